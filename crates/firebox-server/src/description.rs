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

/// What the routes have in common.
#[derive(OpenApi)]
#[openapi(
    info(title = "Firebox", description = "Language models in the shape of OpenAI's API, and what more Firebox has."),
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
            .description(Some("Needed where the server has keys."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("key", SecurityScheme::Http(scheme));
    }
}

/// Every route may refuse, or fail.
impl IntoResponses for ApiError {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let error = |why: &str| -> RefOr<Response> {
            let content = utoipa::openapi::Content::new(Some(Ref::from_schema_name("ErrorBody")));
            ResponseBuilder::new().description(why).content("application/json", content).build().into()
        };
        BTreeMap::from([
            ("4XX".to_owned(), error("The request makes no sense, or is not allowed.")),
            ("5XX".to_owned(), error("The server cannot do it, or not now.")),
        ])
    }
}

/// The document as a text.
#[derive(Debug, Clone)]
pub(crate) struct Description(pub std::sync::Arc<str>);

impl Description {
    pub fn of(document: &Document) -> Self {
        // A document is nothing but maps, lists and texts, which can always be written.
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
async fn openapi(Extension(Description(text)): Extension<Description>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], text.to_string())
}
