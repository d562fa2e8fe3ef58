//! Two hosts that talk over loopback. Who owns what is scripted; everything else is real.

mod internal;
mod passing;

use super::{
    Cluster, ClusterKey, ClusterOptions, DrainRequests,
    owners::{Owners, Subject},
};
use crate::{ConnectionOptions, Gateway, GatewayOptions, routes_of, server, tests::fixture::TestResponse};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use futures::future::BoxFuture;
use skep_runtime::{AgentHost, Member, RuntimeError, SessionPlace};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
};
use tokio::{net::TcpListener, sync::watch};
use tower::ServiceExt;

/// The numbers of the two hosts.
const HERE: i64 = 1;
const THERE: i64 = 2;

fn key() -> ClusterKey {
    ClusterKey::new(&[b'k'; 32]).unwrap()
}

/// A script of who owns what: a place for each question, and the last one for all further questions. `None` is here.
struct Script {
    places: Mutex<Vec<Option<Member>>>,
    asked: Mutex<Vec<Subject>>,
    live: Mutex<HashSet<i64>>,
}

impl Script {
    fn new(places: Vec<Option<Member>>) -> Arc<Self> {
        let live = Mutex::new([HERE, THERE].into());
        Arc::new(Script { places: Mutex::new(places), asked: Mutex::default(), live })
    }

    fn asked(&self) -> Vec<Subject> {
        self.asked.lock().unwrap().clone()
    }
}

impl Owners for Script {
    fn place<'a>(&'a self, subject: &'a Subject) -> BoxFuture<'a, Result<SessionPlace, RuntimeError>> {
        self.asked.lock().unwrap().push(subject.clone());
        let mut places = self.places.lock().unwrap();
        let place = if places.len() > 1 { places.remove(0) } else { places[0].clone() };
        let place = place.map_or(SessionPlace::Here, SessionPlace::There);
        Box::pin(async move { Ok(place) })
    }

    fn live(&self) -> BoxFuture<'_, Result<HashSet<i64>, RuntimeError>> {
        let live = self.live.lock().unwrap().clone();
        Box::pin(async move { Ok(live) })
    }
}

/// Returns a gateway of a cluster.
fn gateway(host: &AgentHost, options: GatewayOptions, number: i64, owners: Arc<Script>) -> Gateway {
    let cluster = ClusterOptions { key: key(), number, drain: DrainRequests::default() };
    let mut gateway = Gateway::new(host.clone(), options);
    gateway.cluster = Some(Arc::new(Cluster::new(cluster, owners)));
    gateway
}

/// Returns the routes of the host that clients talk to.
fn here(host: &AgentHost, owners: &Arc<Script>) -> Router {
    routes_of(gateway(host, GatewayOptions::default(), HERE, owners.clone()))
}

/// Serves routes on a port until the sender is dropped, as the other host.
async fn serve(routes: Router) -> (Member, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let member = member(&listener);
    let (stop, stopping) = watch::channel(false);
    tokio::spawn(server::serve(listener, routes, ConnectionOptions::default(), Vec::new(), stopping));
    (member, stop)
}

fn member(listener: &TcpListener) -> Member {
    Member { number: THERE, url: format!("http://{}", listener.local_addr().unwrap()) }
}

/// Returns the address of a host that has ended.
async fn ended() -> Member {
    member(&TcpListener::bind("127.0.0.1:0").await.unwrap())
}

/// Returns the number of the host that gave an answer.
fn answered_by(answer: &TestResponse) -> &str {
    answer.headers["x-skep-host"].to_str().unwrap()
}

async fn ask(routes: &Router, request: Request<Body>) -> TestResponse {
    let response = routes.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    let text = String::from_utf8(bytes.into()).unwrap();
    TestResponse { status: parts.status, headers: parts.headers, text }
}
