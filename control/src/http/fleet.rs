//! Accelerators, policies, keys.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forebay_control_api::{
    Accelerator, AcceleratorName, AccessKeyBody, AccessKeyId, AccessKeyInfo, Policy, PolicyName, Problem,
};

use super::House;
use super::caller::{May, ToChange, ToRead};
use super::read::{Named, Written};
use crate::error::ApiError;
use crate::service::Service;

type Answer<T> = Result<Json<T>, ApiError>;
type Done = Result<StatusCode, ApiError>;

/// Every accelerator, by name
#[utoipa::path(get, path = "/v1/accelerators", tag = "fleet", responses(
    (status = OK, body = Vec<Accelerator>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_accelerators(
    _: May<ToRead>,
    State(house): State<House>,
) -> Answer<Vec<Accelerator>> {
    house.verb(Service::accelerators).await.map(Json)
}

/// One accelerator
#[utoipa::path(get, path = "/v1/accelerators/{name}", tag = "fleet", params(("name" = String, Path)), responses(
    (status = OK, body = Accelerator),
    (status = "default", body = Problem),
))]
pub(super) async fn get_accelerator(
    _: May<ToRead>,
    State(house): State<House>,
    Named(name): Named<AcceleratorName>,
) -> Answer<Accelerator> {
    house.verb(move |service| service.accelerator(&name)).await.map(Json)
}

/// Add or replace an accelerator
#[utoipa::path(put, path = "/v1/accelerators/{name}", tag = "fleet", params(("name" = String, Path)),
    request_body = Accelerator, responses(
    (status = OK, body = Accelerator),
    (status = "default", body = Problem),
))]
pub(super) async fn put_accelerator(
    _: May<ToChange>,
    State(house): State<House>,
    Named(name): Named<AcceleratorName>,
    Written(accelerator): Written<Accelerator>,
) -> Answer<Accelerator> {
    same_name(&name, &accelerator.name)?;
    house.verb(move |service| service.put_accelerator(&accelerator).map(|()| accelerator)).await.map(Json)
}

/// Remove an accelerator
#[utoipa::path(delete, path = "/v1/accelerators/{name}", tag = "fleet", params(("name" = String, Path)), responses(
    (status = NO_CONTENT),
    (status = "default", body = Problem),
))]
pub(super) async fn delete_accelerator(
    _: May<ToChange>,
    State(house): State<House>,
    Named(name): Named<AcceleratorName>,
) -> Done {
    house.verb(move |service| service.delete_accelerator(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Every policy, by name
#[utoipa::path(get, path = "/v1/policies", tag = "fleet", responses(
    (status = OK, body = Vec<Policy>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_policies(_: May<ToRead>, State(house): State<House>) -> Answer<Vec<Policy>> {
    house.verb(Service::policies).await.map(Json)
}

/// One policy
#[utoipa::path(get, path = "/v1/policies/{name}", tag = "fleet", params(("name" = String, Path)), responses(
    (status = OK, body = Policy),
    (status = "default", body = Problem),
))]
pub(super) async fn get_policy(
    _: May<ToRead>,
    State(house): State<House>,
    Named(name): Named<PolicyName>,
) -> Answer<Policy> {
    house.verb(move |service| service.policy(&name)).await.map(Json)
}

/// Add or replace a policy
#[utoipa::path(put, path = "/v1/policies/{name}", tag = "fleet", params(("name" = String, Path)),
    request_body = Policy, responses(
    (status = OK, body = Policy),
    (status = "default", body = Problem),
))]
pub(super) async fn put_policy(
    _: May<ToChange>,
    State(house): State<House>,
    Named(name): Named<PolicyName>,
    Written(policy): Written<Policy>,
) -> Answer<Policy> {
    same_name(&name, &policy.name)?;
    house.verb(move |service| service.put_policy(&policy).map(|()| policy)).await.map(Json)
}

/// Remove a policy that no accelerator names
#[utoipa::path(delete, path = "/v1/policies/{name}", tag = "fleet", params(("name" = String, Path)), responses(
    (status = NO_CONTENT),
    (status = "default", body = Problem),
))]
pub(super) async fn delete_policy(
    _: May<ToChange>,
    State(house): State<House>,
    Named(name): Named<PolicyName>,
) -> Done {
    house.verb(move |service| service.delete_policy(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Every key, without its secret
#[utoipa::path(get, path = "/v1/keys", tag = "fleet", responses(
    (status = OK, body = Vec<AccessKeyInfo>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_keys(_: May<ToRead>, State(house): State<House>) -> Answer<Vec<AccessKeyInfo>> {
    house.verb(Service::keys).await.map(Json)
}

/// Add or replace a key
#[utoipa::path(put, path = "/v1/keys/{access_key}", tag = "fleet", params(("access_key" = String, Path)),
    request_body = AccessKeyBody, responses(
    (status = OK, body = AccessKeyInfo),
    (status = "default", body = Problem),
))]
pub(super) async fn put_key(
    _: May<ToChange>,
    State(house): State<House>,
    Named(access_key): Named<AccessKeyId>,
    Written(body): Written<AccessKeyBody>,
) -> Answer<AccessKeyInfo> {
    house.verb(move |service| service.put_key(access_key, body)).await.map(Json)
}

/// Remove a key
#[utoipa::path(delete, path = "/v1/keys/{access_key}", tag = "fleet", params(("access_key" = String, Path)),
    responses(
    (status = NO_CONTENT),
    (status = "default", body = Problem),
))]
pub(super) async fn delete_key(
    _: May<ToChange>,
    State(house): State<House>,
    Named(access_key): Named<AccessKeyId>,
) -> Done {
    house.verb(move |service| service.delete_key(&access_key)).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn same_name<T: PartialEq + std::fmt::Display>(path: &T, body: &T) -> Result<(), ApiError> {
    if path == body {
        return Ok(());
    }
    Err(ApiError::invalid(
        "two_names",
        format!("the path says `{path}` and the body `{body}`"),
        "say the same name in both",
    ))
}
