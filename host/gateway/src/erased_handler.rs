//! Handlers without their types, so that axum's services are compiled once and not for each route.
//!
//! axum wraps every handler in a stack of services, and the compiler looks up their associated types for each of more than a hundred
//! handlers: that took a third of the time in which this crate was compiled. All routes have the same type here.

use crate::Gateway;
use axum::{
    extract::Request,
    handler::Handler,
    response::Response,
    routing::{MethodFilter, MethodRouter},
};
use std::{future::Future, pin::Pin, sync::Arc};

/// The future of a handler that is a function.
type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;

/// A handler of any type.
#[derive(Clone)]
struct ErasedHandler(Arc<dyn Fn(Request, Gateway) -> Answering + Send + Sync>);

/// Tells axum how [`ErasedHandler`] is called.
struct WholeRequest;

impl Handler<WholeRequest, Gateway> for ErasedHandler {
    type Future = Answering;

    fn call(self, request: Request, gateway: Gateway) -> Answering {
        (self.0)(request, gateway)
    }
}

/// Adds a handler, a function, for requests with a method of the filter.
pub(crate) fn on<T>(
    router: MethodRouter<Gateway>,
    filter: MethodFilter,
    handler: impl Handler<T, Gateway, Future = Answering>,
) -> MethodRouter<Gateway> {
    let call = move |request, gateway| handler.clone().call(request, gateway);
    router.on(filter, ErasedHandler(Arc::new(call)))
}

/// Returns the routes of handlers at one path, and their descriptions, as `utoipa_axum::routes` does.
macro_rules! routes {
    ($($handler:path),+) => {{
        use utoipa_axum::PathItemExt as _;
        let (mut schemas, mut paths) = (Vec::new(), utoipa::openapi::path::Paths::new());
        let mut router = axum::routing::MethodRouter::new();
        $(
            let (path, operation, methods) = utoipa_axum::routes!(@resolve_types $handler : schemas);
            for method in &methods {
                router = $crate::erased_handler::on(router, method.to_method_filter(), $handler);
            }
            paths.add_path_operation(&path, methods, operation);
        )+
        (schemas, paths, router)
    }};
}
pub(crate) use routes;
