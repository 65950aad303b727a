//! Why the control plane does not do what was asked: one sentence outwards, one inwards.
//!
//! The status is chosen by what the asker should do next: change the request (4xx), come again (503), or call us
//! (500). The inward half goes to the log alone.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forebay_control_api::Problem;

use crate::store::StoreError;

/// An answer that is not a success.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) problem: Problem,
    inward: Option<String>,
}

impl ApiError {
    pub(crate) fn new(
        status: StatusCode,
        code: &str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { status, problem: Problem::new(code, message, remedy), inward: None }
    }

    /// What was sent cannot be.
    pub(crate) fn invalid(code: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message, remedy)
    }

    /// What was named is not there.
    pub(crate) fn unknown(code: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, code, message, remedy)
    }

    /// It cannot be as things stand.
    pub(crate) fn conflict(code: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, code, message, remedy)
    }

    /// It is ours; `why` is for the log.
    pub(crate) fn internal(why: impl Into<String>) -> Self {
        let mut error = Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the control plane could not do it",
            "look into its log; nodes serve on with the state they have",
        );
        error.inward = Some(why.into());
        error
    }

    /// The same for a person at a terminal.
    pub(crate) fn into_words(self) -> anyhow::Error {
        match self.inward {
            Some(why) => anyhow::anyhow!(why),
            None => anyhow::anyhow!("{}", self.problem),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::internal(format!("{:#}", anyhow::Error::from(error)))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if let Some(why) = &self.inward {
            tracing::error!(code = %self.problem.code, %why, "request failed");
        }
        let mut response = (self.status, Json(self.problem)).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
