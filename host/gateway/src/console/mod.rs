//! The console: pages for a browser, which use the public HTTP API and nothing else.
//!
//! The files lie in `ui`, are plain modules without a build step, and are embedded. They hold nothing secret, so they
//! need no key; the page signs in (`sign_in`) and then sends its requests like any other client.

mod assets;
pub(crate) mod sign_in;

use crate::{ApiError, Gateway};
use assets::{Asset, INDEX, find};
use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Redirect, Response},
    routing::get,
};
use std::path::PathBuf;

/// Whether the console is served, and where its files come from.
#[derive(Clone, Debug, Default)]
pub enum ConsoleOptions {
    /// Serves the embedded files.
    #[default]
    Embedded,
    /// Serves the files of a folder, which is read for each request, for people who change them.
    Folder(PathBuf),
    /// Serves no console.
    Off,
}

/// Routes of the console's pages, which need no key.
pub(crate) const PAGES: [&str; 4] = ["/", "/ui", "/ui/", "/ui/{*path}"];

/// Allows the page its own scripts, styles and requests, and no other page to embed it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

/// Returns the routes of the pages.
pub(crate) fn pages(options: &ConsoleOptions) -> Router<Gateway> {
    if matches!(options, ConsoleOptions::Off) {
        return Router::new();
    }
    Router::new()
        .route("/", get(|| async { Redirect::temporary("/ui") }))
        .route("/ui", get(index))
        .route("/ui/", get(index))
        .route("/ui/{*path}", get(page))
}

/// Returns whether a request is for a page or a file of the console. Links of other sites may lead there.
pub(crate) fn is_page(path: &str) -> bool {
    path == "/" || path == "/ui" || path.starts_with("/ui/")
}

async fn index(State(gateway): State<Gateway>, headers: HeaderMap) -> Response {
    respond(find(&gateway.options.console, INDEX), &headers)
}

/// Responds with a file. Every other path is a page, whose script reads its address.
async fn page(State(gateway): State<Gateway>, Path(path): Path<String>, headers: HeaderMap) -> Response {
    let console = &gateway.options.console;
    let has_extension = path.rsplit('/').next().is_some_and(|name| name.contains('.'));
    match find(console, &path) {
        None if has_extension => {
            let message = format!("the console has no file {path:?}");
            ApiError::new(StatusCode::NOT_FOUND, "not_found", message).into_response()
        }
        None => respond(find(console, INDEX), &headers),
        asset => respond(asset, &headers),
    }
}

fn respond(asset: Option<Asset>, headers: &HeaderMap) -> Response {
    let Some(asset) = asset else {
        let message = "the console's folder has no index.html; give `--ui-dir` the folder host/gateway/ui of the sources";
        return ApiError::new(StatusCode::NOT_FOUND, "not_found", message).into_response();
    };
    let Asset { kind, etag, plain, gzip } = asset;
    let mut response = Response::default();
    let fixed = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "accept-encoding"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in fixed {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if text(header::IF_NONE_MATCH).split(',').any(|known| known.trim() == etag) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return response;
    }
    let accepts_gzip = text(header::ACCEPT_ENCODING).split(',').any(|coding| {
        let (coding, quality) = coding.split_once(';').unwrap_or((coding, ""));
        coding.trim() == "gzip" && !matches!(quality.trim(), "q=0" | "q=0.0")
    });
    *response.body_mut() = match gzip {
        Some(gzip) if accepts_gzip => {
            let encoding = HeaderValue::from_static("gzip");
            response.headers_mut().insert(header::CONTENT_ENCODING, encoding);
            gzip.into()
        }
        _ => plain.into(),
    };
    response
}
