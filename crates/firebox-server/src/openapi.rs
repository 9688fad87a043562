//! The OpenAPI document of the API.

use std::collections::BTreeMap;

use axum::Extension;
use axum::http::header;
use axum::response::IntoResponse;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{OpenApi as Document, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, Modify, OpenApi};
use utoipa_axum::routes;

use crate::app::Routes;
use crate::error::ApiError;
use crate::schema::{ErrorBody, ErrorInside};

/// The parts of the document that routes share.
#[derive(OpenApi)]
#[openapi(
    info(title = "Firebox", description = "Language models with OpenAI's API and Firebox's extensions."),
    components(schemas(ErrorBody, ErrorInside)),
    modifiers(&Bearer),
    security((), ("key" = []))
)]
pub(crate) struct Common;

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut Document) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("Required if the server has keys."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("key", SecurityScheme::Http(scheme));
    }
}

/// The error responses of every route.
impl IntoResponses for ApiError {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let error = |why: &str| -> RefOr<Response> {
            let content = utoipa::openapi::Content::new(Some(Ref::from_schema_name("ErrorBody")));
            ResponseBuilder::new().description(why).content("application/json", content).build().into()
        };
        BTreeMap::from([
            ("4XX".to_owned(), error("The request is invalid or not allowed.")),
            ("5XX".to_owned(), error("The server failed or is unavailable.")),
        ])
    }
}

/// The OpenAPI document as JSON.
#[derive(Debug, Clone)]
pub(crate) struct OpenApiDocument(pub std::sync::Arc<str>);

impl OpenApiDocument {
    pub fn new(document: &Document) -> Self {
        // A document has only maps, lists and strings, so writing it cannot fail.
        Self(document.to_json().unwrap_or_default().into())
    }
}

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(openapi))
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "server",
    responses((status = 200, description = "The document", body = Object), ApiError)
)]
async fn openapi(Extension(OpenApiDocument(text)): Extension<OpenApiDocument>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], text.to_string())
}
