//! Nodes and the placement.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forebay_control_api::{FleetState, Heartbeat, Node, NodeId, Placement, Problem, Registration};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;

use super::House;
use super::caller::{May, ToAdminister, ToBeNode, ToChange, ToRead, ToReadPlacement};
use super::read::{Named, Sent, Wait, Written};
use crate::error::ApiError;
use crate::service::Service;

/// Every node, by id
#[utoipa::path(get, path = "/v1/nodes", tag = "nodes", responses(
    (status = OK, body = Vec<Node>),
    (status = "default", body = Problem),
))]
pub(super) async fn list_nodes(
    _: May<ToRead>,
    State(house): State<House>,
) -> Result<Json<Vec<Node>>, ApiError> {
    house.verb(Service::nodes).await.map(Json)
}

/// One node
#[utoipa::path(get, path = "/v1/nodes/{id}", tag = "nodes", params(("id" = String, Path)), responses(
    (status = OK, body = Node),
    (status = "default", body = Problem),
))]
pub(super) async fn get_node(
    _: May<ToRead>,
    State(house): State<House>,
    Named(id): Named<NodeId>,
) -> Result<Json<Node>, ApiError> {
    house.verb(move |service| service.node(&id)).await.map(Json)
}

/// A node has started: it is told the whole state
#[utoipa::path(put, path = "/v1/nodes/{id}", tag = "nodes", params(("id" = String, Path)),
    request_body = Registration, responses(
    (status = OK, body = FleetState),
    (status = "default", body = Problem),
))]
pub(super) async fn register_node(
    _: May<ToBeNode>,
    State(house): State<House>,
    Named(id): Named<NodeId>,
    Sent(registration): Sent<Registration>,
) -> Result<Json<FleetState>, ApiError> {
    let now = Instant::now();
    house.verb(move |service| service.register(&id, registration, now)).await.map(Json)
}

/// A node is there: it is told the whole state if it holds an older one
#[utoipa::path(post, path = "/v1/nodes/{id}/heartbeat", tag = "nodes",
    params(("id" = String, Path), ("wait" = Option<String>, Query,
        description = "how long to hold the answer back until there is news, e.g. 10s; at most a third of fence_after")),
    request_body = Heartbeat, responses(
    (status = OK, body = FleetState, description = "a newer state than the one held"),
    (status = NO_CONTENT, description = "nothing new"),
    (status = "default", body = Problem),
))]
pub(super) async fn heartbeat(
    _: May<ToBeNode>,
    State(house): State<House>,
    Named(id): Named<NodeId>,
    Wait(wait): Wait,
    Sent(said): Sent<Heartbeat>,
) -> Result<Response, ApiError> {
    let (held, now) = (said.revision, Instant::now());
    let node = id.clone();
    let mut state = house.verb(move |service| service.heartbeat(&node, &said, now)).await?;
    if state.is_none() && house.wait_for_news(held, wait).await {
        state = Some(house.verb(move |service| service.state_for(&id)).await?);
    }
    Ok(match state {
        Some(state) => Json(state).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

/// Take a node's groups away; it serves on
#[utoipa::path(post, path = "/v1/nodes/{id}/drain", tag = "nodes", params(("id" = String, Path)), responses(
    (status = OK, body = Node),
    (status = "default", body = Problem),
))]
pub(super) async fn drain_node(
    _: May<ToChange>,
    State(house): State<House>,
    Named(id): Named<NodeId>,
) -> Result<Json<Node>, ApiError> {
    house.verb(move |service| service.set_draining(&id, true)).await.map(Json)
}

/// Give a drained node its groups back
#[utoipa::path(post, path = "/v1/nodes/{id}/resume", tag = "nodes", params(("id" = String, Path)), responses(
    (status = OK, body = Node),
    (status = "default", body = Problem),
))]
pub(super) async fn resume_node(
    _: May<ToChange>,
    State(house): State<House>,
    Named(id): Named<NodeId>,
) -> Result<Json<Node>, ApiError> {
    house.verb(move |service| service.set_draining(&id, false)).await.map(Json)
}

/// Forget a node
#[utoipa::path(delete, path = "/v1/nodes/{id}", tag = "nodes", params(("id" = String, Path)), responses(
    (status = NO_CONTENT),
    (status = "default", body = Problem),
))]
pub(super) async fn remove_node(
    _: May<ToChange>,
    State(house): State<House>,
    Named(id): Named<NodeId>,
) -> Result<StatusCode, ApiError> {
    house.verb(move |service| service.remove_node(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The placement in force, whole; its entity tag is its epoch
#[utoipa::path(get, path = "/v1/placement", tag = "placement", responses(
    (status = OK, body = Placement),
    (status = NOT_MODIFIED, description = "If-None-Match names the placement in force"),
    (status = "default", body = Problem),
))]
pub(super) async fn get_placement(
    _: May<ToReadPlacement>,
    State(house): State<House>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let placement = house.verb(Service::placement).await?;
    let tag = format!("\"epoch-{}\"", placement.epoch);
    let held = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let same = held.flat_map(|value| value.split(',')).any(|held| held.trim() == tag || held.trim() == "*");
    if same {
        return Ok((StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response());
    }
    Ok(([(header::ETAG, tag)], Json(placement)).into_response())
}

/// What is sent to go on from an older store.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct Advance {
    /// The highest revision that a node has seen; the next one is above it.
    past: u64,
}

/// Go on from a store that is an older copy
#[utoipa::path(post, path = "/v1/placement/advance", tag = "placement", request_body = Advance, responses(
    (status = OK, body = Placement),
    (status = "default", body = Problem),
))]
pub(super) async fn advance_placement(
    _: May<ToAdminister>,
    State(house): State<House>,
    Written(Advance { past }): Written<Advance>,
) -> Result<Json<Placement>, ApiError> {
    house.verb(move |service| service.advance(past)).await.map(Json)
}
