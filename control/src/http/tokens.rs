//! Tokens of the control plane.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forebay_control_api::{Problem, TokenBody, TokenInfo, TokenIssued};

use super::House;
use super::caller::{May, ToAdminister};
use super::read::{Named, Written};
use crate::error::ApiError;
use crate::service::Service;

/// Every token that was issued, without its text
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", responses(
    (status = OK, body = Vec<TokenInfo>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_tokens(
    _: May<ToAdminister>,
    State(house): State<House>,
) -> Result<Json<Vec<TokenInfo>>, ApiError> {
    house.verb(Service::tokens).await.map(Json)
}

/// Issue a token; its text is in this answer and nowhere else
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = TokenBody, responses(
    (status = CREATED, body = TokenIssued),
    (status = "default", body = Problem),
))]
pub(super) async fn issue_token(
    _: May<ToAdminister>,
    State(house): State<House>,
    Written(body): Written<TokenBody>,
) -> Result<(StatusCode, Json<TokenIssued>), ApiError> {
    let issued = house.verb(move |service| service.issue_token(body)).await?;
    Ok((StatusCode::CREATED, Json(issued)))
}

/// End a token
#[utoipa::path(delete, path = "/v1/tokens/{id}", tag = "tokens", params(("id" = String, Path)), responses(
    (status = NO_CONTENT),
    (status = "default", body = Problem),
))]
pub(super) async fn revoke_token(
    _: May<ToAdminister>,
    State(house): State<House>,
    Named(id): Named<String>,
) -> Result<StatusCode, ApiError> {
    house.verb(move |service| service.revoke_token(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}
