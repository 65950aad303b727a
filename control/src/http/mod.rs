//! The REST door: thin. It knows who asks, reads what is asked, calls a verb and says what came of it.
//!
//! A handler cannot forget to ask who is asking: it takes a proof ([`May`]) as an argument, which only exists for a
//! bearer whose role suffices. The `OpenAPI` document is made from the same handlers that answer.

mod caller;
mod errands;
mod fleet;
mod listen;
mod nodes;
mod read;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Json, Router};
use forebay_control_api::{ControlStatus, Problem};
use tokio::sync::watch;
use tokio::time::Instant;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::service::Service;
use caller::{May, ToRead};
pub(crate) use listen::{bind, serve};

/// Bytes of one request's body.
const BODY_BYTES_MAX: usize = 1 << 20;

/// What handlers share.
#[derive(Clone, Debug)]
pub(crate) struct House {
    service: Arc<Service>,
    /// Becomes `true` when the server stops: whoever is held back is answered.
    closing: watch::Receiver<bool>,
}

impl House {
    pub(crate) fn new(service: Arc<Service>, closing: watch::Receiver<bool>) -> Self {
        Self { service, closing }
    }

    /// Runs a verb where it may wait for the drive.
    async fn verb<T: Send + 'static>(
        &self,
        verb: impl FnOnce(&Service) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let service = Arc::clone(&self.service);
        tokio::task::spawn_blocking(move || verb(&service))
            .await
            .map_err(|error| ApiError::internal(format!("a verb ended badly: {error}")))?
    }

    /// Holds a request back until there is a revision other than `held`, or `wait` is over, or the server stops.
    /// Whether there is news.
    async fn wait_for_news(&self, held: u64, wait: Duration) -> bool {
        let mut news = self.service.news();
        let mut closing = self.closing.clone();
        tokio::select! {
            news = news.wait_for(|revision| *revision != held) => news.is_ok(),
            _ = closing.wait_for(|closing| *closing) => false,
            () = tokio::time::sleep(wait.min(self.service.wait_max())) => false,
        }
    }
}

/// Every path, and the document that describes them.
fn paths() -> OpenApiRouter<House> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health))
        .routes(routes!(openapi_json))
        .routes(routes!(status))
        .routes(routes!(fleet::list_accelerators))
        .routes(routes!(fleet::get_accelerator, fleet::put_accelerator, fleet::delete_accelerator))
        .routes(routes!(fleet::list_policies))
        .routes(routes!(fleet::get_policy, fleet::put_policy, fleet::delete_policy))
        .routes(routes!(fleet::list_keys))
        .routes(routes!(fleet::put_key, fleet::delete_key))
        .routes(routes!(nodes::list_nodes))
        .routes(routes!(nodes::get_node, nodes::register_node, nodes::remove_node))
        .routes(routes!(nodes::heartbeat))
        .routes(routes!(nodes::drain_node))
        .routes(routes!(nodes::resume_node))
        .routes(routes!(nodes::get_placement))
        .routes(routes!(nodes::advance_placement))
        .routes(routes!(errands::list_prewarms, errands::ask_prewarm))
        .routes(routes!(errands::get_prewarm, errands::cancel_prewarm))
        .routes(routes!(errands::list_purges, errands::ask_purge))
        .routes(routes!(errands::get_purge))
        .routes(routes!(tokens::list_tokens, tokens::issue_token))
        .routes(routes!(tokens::revoke_token))
}

/// The router that answers.
pub(crate) fn router(house: House) -> Router {
    let (router, _) = paths().split_for_parts();
    router
        .fallback(async || {
            ApiError::unknown(
                "unknown_path",
                "there is nothing at this path",
                "GET /v1/openapi.json lists what there is",
            )
        })
        .method_not_allowed_fallback(async || {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "bad_method",
                "this path does not take this method",
                "GET /v1/openapi.json lists what each path takes",
            )
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn(log))
        .with_state(house)
}

/// The `OpenAPI` document, as text that ends with a newline.
pub(crate) fn document() -> String {
    let (_, document) = paths().split_for_parts();
    let mut text = document.to_pretty_json().expect("the document is plain data");
    text.push('\n');
    text
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Forebay control plane", description = "Who serves what, and who may. Every error is a Problem."),
    modifiers(&Bearer),
    security(("token" = []))
)]
struct Document;

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        components.add_security_scheme("token", scheme);
    }
}

/// Whether the control plane answers
#[utoipa::path(get, path = "/healthz", tag = "control", security(()), responses((status = OK, body = String)))]
async fn health(State(house): State<House>) -> Result<&'static str, ApiError> {
    house.verb(|service| service.placement().map(drop)).await?;
    Ok("ok\n")
}

/// This document
#[utoipa::path(get, path = "/v1/openapi.json", tag = "control", security(()), responses((status = OK, body = Object)))]
async fn openapi_json() -> ([(&'static str, &'static str); 1], String) {
    ([("content-type", "application/json")], document())
}

/// What the control plane is and holds
#[utoipa::path(get, path = "/v1/status", tag = "control", responses(
    (status = OK, body = ControlStatus),
    (status = "default", body = Problem),
))]
async fn status(_: May<ToRead>, State(house): State<House>) -> Result<Json<ControlStatus>, ApiError> {
    let now = Instant::now();
    house.verb(move |service| service.status(now)).await.map(Json)
}

/// One line when a request ends. Reads and heartbeats are many and go to `debug`.
async fn log(request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let (status, ms) = (response.status().as_u16(), begun.elapsed().as_millis());
    if method == Method::GET || path.ends_with("/heartbeat") {
        tracing::debug!(%method, path, status, ms, "request done");
    } else {
        tracing::info!(%method, path, status, ms, "request done");
    }
    response
}
