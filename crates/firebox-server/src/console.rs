//! The console: a page and its assets.

use axum::extract::Path;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::app::Routes;
use crate::error::ApiError;

/// Name, content type and content of an asset.
type Asset = (&'static str, &'static str, &'static str);

const PAGE: &str = include_str!("console/index.html");

const SCRIPT: &str = "text/javascript; charset=utf-8";

const ASSETS: [Asset; 11] = [
    ("style.css", "text/css; charset=utf-8", include_str!("console/style.css")),
    ("icon.svg", "image/svg+xml", include_str!("console/icon.svg")),
    ("app.js", SCRIPT, include_str!("console/app.js")),
    ("api.js", SCRIPT, include_str!("console/api.js")),
    ("dom.js", SCRIPT, include_str!("console/dom.js")),
    ("chat.js", SCRIPT, include_str!("console/chat.js")),
    ("streams.js", SCRIPT, include_str!("console/streams.js")),
    ("segments.js", SCRIPT, include_str!("console/segments.js")),
    ("timeline.js", SCRIPT, include_str!("console/timeline.js")),
    ("budget.js", SCRIPT, include_str!("console/budget.js")),
    ("plots.js", SCRIPT, include_str!("console/plots.js")),
];

/// Only resources of this server load, and no other site may frame the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Needs no key: the page's data comes from routes that do.
pub(crate) fn routes() -> Routes {
    Routes::new().route("/", get(page)).route("/console/{asset}", get(asset))
}

async fn page() -> Response {
    sent("text/html; charset=utf-8", PAGE)
}

async fn asset(Path(name): Path<String>) -> Result<Response, ApiError> {
    let found = ASSETS.iter().find(|(known, ..)| *known == name);
    let (_, kind, content) = found.ok_or_else(|| ApiError::no_route(&format!("/console/{name}")))?;
    Ok(sent(kind, content))
}

fn sent(kind: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    ];
    (headers, content).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every resource of the page is among the assets.
    #[test]
    fn nothing_is_fetched_from_elsewhere() {
        let all = ASSETS.iter().map(|(_, _, content)| *content).chain([PAGE]);
        for content in all {
            for (at, _) in content.match_indices("http") {
                let rest = &content[at..];
                let known = rest.starts_with("http://www.w3.org/")
                    || !rest.contains("://")
                    || !rest[..8].contains("://");
                assert!(known, "{}", &rest[..rest.len().min(60)]);
            }
            assert!(!content.contains("innerHTML"), "model output must stay text");
        }
        for (name, kind, content) in ASSETS {
            assert!(
                name == "app.js"
                    || PAGE.contains(name)
                    || ASSETS.iter().any(|(_, _, by)| by.contains(&format!("./{name}"))),
                "{name} is unused"
            );
            if kind == SCRIPT {
                for line in content.lines().filter(|line| line.starts_with("import ")) {
                    let from = line.split("\"./").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
                    assert!(ASSETS.iter().any(|(known, ..)| *known == from), "{name}: {line}");
                }
            }
        }
    }
}
