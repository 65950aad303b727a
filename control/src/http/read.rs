//! Reading what is sent: bodies, names in paths, lengths of time in queries; each refusal says what to change.

use std::str::FromStr;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use forebay_control_api::Span;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{BODY_BYTES_MAX, House};
use crate::error::ApiError;

/// A body that a person wrote: a field that nobody understands is refused.
pub(super) struct Written<T>(pub(super) T);

/// A body that a program wrote, perhaps a newer one: fields that nobody understands are left alone.
pub(super) struct Sent<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<House> for Written<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, house: &House) -> Result<Self, ApiError> {
        let bytes = body(request, house).await?;
        let mut ignored = Vec::new();
        let mut reader = serde_json::Deserializer::from_slice(&bytes);
        let value = serde_ignored::deserialize(&mut reader, |path| ignored.push(path.to_string()))
            .and_then(|value| reader.end().map(|()| value))
            .map_err(|error| bad_json(&error))?;
        if ignored.is_empty() {
            return Ok(Self(value));
        }
        Err(ApiError::invalid(
            "unknown_field",
            format!("nothing here is called `{}`", ignored.join("`, `")),
            "correct the spelling or leave it out; GET /v1/openapi.json lists the fields",
        ))
    }
}

impl<T: DeserializeOwned> FromRequest<House> for Sent<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, house: &House) -> Result<Self, ApiError> {
        let bytes = body(request, house).await?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| bad_json(&error))
    }
}

async fn body(request: Request, house: &House) -> Result<Bytes, ApiError> {
    Bytes::from_request(request, house).await.map_err(|rejection| match rejection {
        BytesRejection::FailedToBufferBody(failed) if failed.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "too_large",
                format!("the body has more than {BODY_BYTES_MAX} bytes"),
                "send less at once",
            )
        }
        other => ApiError::invalid("bad_body", other.to_string(), "send the body whole"),
    })
}

fn bad_json(error: &serde_json::Error) -> ApiError {
    ApiError::invalid(
        "bad_json",
        format!("the body cannot be read: {error}"),
        "GET /v1/openapi.json shows its form",
    )
}

/// The one name in a path.
pub(super) struct Named<T>(pub(super) T);

impl<T> FromRequestParts<House> for Named<T>
where
    T: FromStr<Err: std::fmt::Display> + Send,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, house: &House) -> Result<Self, ApiError> {
        let remedy = "correct the name in the path";
        let Path(text) = Path::<String>::from_request_parts(parts, house)
            .await
            .map_err(|rejection| ApiError::invalid("bad_name", rejection.body_text(), remedy))?;
        text.parse()
            .map(Self)
            .map_err(|error: T::Err| ApiError::invalid("bad_name", error.to_string(), remedy))
    }
}

/// `?wait=10s`: how long an answer may be held back until there is news. Zero without it.
pub(super) struct Wait(pub(super) Duration);

#[derive(Deserialize)]
struct WaitQuery {
    wait: Option<Span>,
}

impl FromRequestParts<House> for Wait {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, house: &House) -> Result<Self, ApiError> {
        Query::<WaitQuery>::from_request_parts(parts, house)
            .await
            .map(|Query(query)| Self(query.wait.unwrap_or_default().duration()))
            .map_err(|rejection| {
                ApiError::invalid("bad_wait", rejection.body_text(), "write it as ?wait=10s")
            })
    }
}
