//! Who asks, and whether they may.
//!
//! | need | roles |
//! |---|---|
//! | [`ToRead`] | admin, operator, reader |
//! | [`ToReadPlacement`] | every role |
//! | [`ToChange`] | admin, operator |
//! | [`ToAdminister`] | admin |
//! | [`ToBeNode`] | admin, node |

use std::marker::PhantomData;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use forebay_control_api::Role;

use super::House;
use crate::error::ApiError;

/// What a handler asks of its caller.
pub(super) trait Need: Send + 'static {
    /// Roles that suffice.
    const ROLES: &'static [Role];
}

macro_rules! needs {
    ($($(#[$doc:meta])* $name:ident: $($role:ident)+;)+) => {
        $($(#[$doc])*
        #[derive(Debug)]
        pub(super) enum $name {}

        impl Need for $name {
            const ROLES: &'static [Role] = &[$(Role::$role),+];
        })+
    };
}

needs! {
    /// Look at everything but secrets.
    ToRead: Admin Operator Reader;
    /// Look at who owns what.
    ToReadPlacement: Admin Operator Reader Node;
    /// Change what the fleet does.
    ToChange: Admin Operator;
    /// Change who may, and the order of things.
    ToAdminister: Admin;
    /// Register, and be told secrets.
    ToBeNode: Admin Node;
}

/// The proof that the caller's role suffices for `N`. There is no other way to get one than a request with a token.
pub(super) struct May<N: Need>(PhantomData<N>);

impl<N: Need> FromRequestParts<House> for May<N> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, house: &House) -> Result<Self, ApiError> {
        let refused = |code, message: &str, remedy: &str| {
            Err(ApiError::new(StatusCode::UNAUTHORIZED, code, message, remedy))
        };
        let Some(value) = parts.headers.get(header::AUTHORIZATION) else {
            return refused(
                "no_token",
                "this needs a token",
                "send `Authorization: Bearer TOKEN`; on the command line: --token-file FILE",
            );
        };
        let bearer = value.to_str().ok().and_then(|text| text.split_once(' '));
        let Some((_, token)) = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
            return refused(
                "bad_token",
                "the Authorization header is no bearer token",
                "send `Bearer TOKEN`",
            );
        };
        let Some(role) = house.service.role_of(token.trim()) else {
            return refused(
                "wrong_token",
                "this token is not known here, or was revoked",
                "have one issued: `forebay-control token add --role ROLE`",
            );
        };
        if N::ROLES.contains(&role) {
            return Ok(Self(PhantomData));
        }
        let may: Vec<&str> = N::ROLES.iter().map(|role| role.word()).collect();
        Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "wrong_role",
            format!("a token of role {role} may not do this"),
            format!("use a token of role {}", may.join(" or ")),
        ))
    }
}
