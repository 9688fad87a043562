//! `/openapi.json`: the OpenAPI document of the API.
//!
//! The document is a file, so that only tests compile what generates it. After a change of the API, write it anew:
//! `FIREBOX_WRITE_OPENAPI=1 cargo test -p firebox-server --lib openapi`.

use axum::http::header;
use axum::response::IntoResponse;
use axum::routing;

use crate::app::Routes;
#[cfg(test)]
use crate::error::ApiError;

const DOCUMENT: &str = include_str!("openapi.json");

pub(crate) fn routes() -> Routes {
    Routes::new().route("/openapi.json", routing::get(openapi))
}

/// This document.
#[cfg_attr(test, utoipa::path(
    get,
    path = "/openapi.json",
    tag = "server",
    responses((status = 200, description = "The document", body = Object), ApiError)
))]
pub(crate) async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
    use utoipa::openapi::{Content, OpenApi as Document, Ref, RefOr, Response, ResponseBuilder};
    use utoipa::{IntoResponses, Modify, OpenApi};

    use crate::error::ApiError;
    use crate::schema::{ErrorBody, ErrorInside};

    #[derive(OpenApi)]
    #[openapi(
        info(title = "Firebox", description = "Language models with OpenAI's API and Firebox's extensions."),
        paths(
            crate::chat::complete,
            crate::completions::complete,
            crate::embeddings::embed,
            crate::embeddings::rerank_short,
            crate::embeddings::rerank,
            crate::engine_state::state,
            crate::engine_state::events,
            crate::heads::list,
            crate::heads::load,
            crate::health::health,
            crate::health::ready,
            crate::metrics::metrics,
            crate::models::models,
            crate::models::model,
            crate::openapi::openapi,
            crate::responses::respond,
            crate::sessions::list,
            crate::sessions::begin,
            crate::sessions::get,
            crate::sessions::end,
            crate::sessions::say_in,
            crate::sessions::fork,
            crate::sessions::rewind,
            crate::sessions::head,
            crate::sessions::turn,
            crate::sessions::add_fact,
            crate::sessions::supersede,
            crate::sessions::switch,
            crate::sessions::promote,
            crate::sessions::drop_branch,
            crate::sessions::save,
            crate::sessions::remove_saved,
            crate::tokens::tokenize,
            crate::tokens::detokenize
        ),
        components(schemas(ErrorBody, ErrorInside)),
        modifiers(&Bearer),
        security((), ("key" = []))
    )]
    struct Api;

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
                let content = Content::new(Some(Ref::from_schema_name("ErrorBody")));
                ResponseBuilder::new().description(why).content("application/json", content).build().into()
            };
            BTreeMap::from([
                ("4XX".to_owned(), error("The request is invalid or not allowed.")),
                ("5XX".to_owned(), error("The server failed or is unavailable.")),
            ])
        }
    }

    #[test]
    fn the_document_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/openapi.json");
        let generated = Api::openapi().to_pretty_json().unwrap() + "\n";
        if std::env::var_os("FIREBOX_WRITE_OPENAPI").is_some() {
            std::fs::write(path, &generated).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap();
        assert!(written == generated, "run this test with FIREBOX_WRITE_OPENAPI=1 to write {path}");
    }
}
