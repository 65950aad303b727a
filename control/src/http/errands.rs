//! Prewarms and purges.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forebay_control_api::{Prewarm, PrewarmBody, Problem, PurgeBody, PurgeStatus};

use super::House;
use super::caller::{May, ToChange, ToRead};
use super::read::{Named, Written};
use crate::error::ApiError;
use crate::service::Service;

/// Every prewarm that is remembered, newest first
#[utoipa::path(get, path = "/v1/prewarms", tag = "errands", responses(
    (status = OK, body = Vec<Prewarm>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_prewarms(
    _: May<ToRead>,
    State(house): State<House>,
) -> Result<Json<Vec<Prewarm>>, ApiError> {
    house.verb(Service::prewarms).await.map(Json)
}

/// Have a prefix read ahead of its readers; one node does it
#[utoipa::path(post, path = "/v1/prewarms", tag = "errands", request_body = PrewarmBody, responses(
    (status = CREATED, body = Prewarm),
    (status = "default", body = Problem),
))]
pub(super) async fn ask_prewarm(
    _: May<ToChange>,
    State(house): State<House>,
    Written(body): Written<PrewarmBody>,
) -> Result<(StatusCode, Json<Prewarm>), ApiError> {
    let job = house.verb(move |service| service.ask_prewarm(body)).await?;
    Ok((StatusCode::CREATED, Json(job)))
}

/// One prewarm and how far it is
#[utoipa::path(get, path = "/v1/prewarms/{id}", tag = "errands", params(("id" = u64, Path)), responses(
    (status = OK, body = Prewarm),
    (status = "default", body = Problem),
))]
pub(super) async fn get_prewarm(
    _: May<ToRead>,
    State(house): State<House>,
    Named(id): Named<u64>,
) -> Result<Json<Prewarm>, ApiError> {
    house.verb(move |service| service.prewarm(id)).await.map(Json)
}

/// End a prewarm; what was read stays cached
#[utoipa::path(delete, path = "/v1/prewarms/{id}", tag = "errands", params(("id" = u64, Path)), responses(
    (status = NO_CONTENT),
    (status = "default", body = Problem),
))]
pub(super) async fn cancel_prewarm(
    _: May<ToChange>,
    State(house): State<House>,
    Named(id): Named<u64>,
) -> Result<StatusCode, ApiError> {
    house.verb(move |service| service.cancel_prewarm(id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Every purge that is remembered, newest first
#[utoipa::path(get, path = "/v1/purges", tag = "errands", responses(
    (status = OK, body = Vec<PurgeStatus>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_purges(
    _: May<ToRead>,
    State(house): State<House>,
) -> Result<Json<Vec<PurgeStatus>>, ApiError> {
    house.verb(Service::purges).await.map(Json)
}

/// Have every node forget a key or a prefix
#[utoipa::path(post, path = "/v1/purges", tag = "errands", request_body = PurgeBody, responses(
    (status = CREATED, body = PurgeStatus),
    (status = "default", body = Problem),
))]
pub(super) async fn ask_purge(
    _: May<ToChange>,
    State(house): State<House>,
    Written(body): Written<PurgeBody>,
) -> Result<(StatusCode, Json<PurgeStatus>), ApiError> {
    let status = house.verb(move |service| service.ask_purge(body)).await?;
    Ok((StatusCode::CREATED, Json(status)))
}

/// One purge and which nodes have applied it
#[utoipa::path(get, path = "/v1/purges/{sequence}", tag = "errands", params(("sequence" = u64, Path)), responses(
    (status = OK, body = PurgeStatus),
    (status = "default", body = Problem),
))]
pub(super) async fn get_purge(
    _: May<ToRead>,
    State(house): State<House>,
    Named(sequence): Named<u64>,
) -> Result<Json<PurgeStatus>, ApiError> {
    house.verb(move |service| service.purge(sequence)).await.map(Json)
}
