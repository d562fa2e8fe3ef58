//! Two hosts that talk over loopback. Who owns what is scripted; everything else is real.

mod internal;
mod pages;
mod passing;
mod split;

use super::{
    Cluster, ClusterKey, ClusterOptions, DrainRequests, LIVE_FOR,
    owners::{Owners, Subject},
};
use crate::{ConnectionOptions, Gateway, GatewayOptions, routes_of, server, tests::fixture::TestResponse};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use futures::future::BoxFuture;
use skep_runtime::{AgentHost, HostRole, Member, RuntimeError, SessionPlace, TokensInFlight, WorkingHost};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
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
    /// Whether nobody answers which hosts are alive, and how often that was asked.
    is_silent: AtomicBool,
    questions: AtomicUsize,
}

impl Script {
    fn new(places: Vec<Option<Member>>) -> Arc<Self> {
        let live = Mutex::new([HERE, THERE].into());
        let (is_silent, questions) = Default::default();
        Arc::new(Script { places: Mutex::new(places), asked: Mutex::default(), live, is_silent, questions })
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

    /// Returns all hosts that the script still names.
    fn working(&self) -> Vec<WorkingHost> {
        let places = self.places.lock().unwrap();
        let tokens = TokensInFlight::default();
        places.iter().flatten().map(|member| WorkingHost { member: member.clone(), tokens }).collect()
    }

    fn live(&self) -> BoxFuture<'_, Result<HashSet<i64>, RuntimeError>> {
        self.questions.fetch_add(1, Ordering::AcqRel);
        let (live, is_silent) = (self.live.lock().unwrap().clone(), self.is_silent.load(Ordering::Acquire));
        Box::pin(async move {
            if is_silent {
                std::future::pending::<()>().await;
            }
            Ok(live)
        })
    }
}

/// Returns a gateway of a cluster.
fn gateway(host: &AgentHost, options: GatewayOptions, number: i64, owners: Arc<Script>) -> Gateway {
    let cluster = ClusterOptions {
        key: key(),
        number,
        drain: DrainRequests::default(),
        pages: None,
        role: HostRole::All,
    };
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

#[tokio::test]
async fn one_caller_reads_which_hosts_are_alive_and_the_others_do_not_wait() {
    let script = Script::new(vec![None]);
    script.is_silent.store(true, Ordering::Release);
    let options = ClusterOptions {
        key: key(),
        number: HERE,
        drain: DrainRequests::default(),
        pages: None,
        role: HostRole::All,
    };
    let cluster = Arc::new(Cluster::new(options, script.clone()));
    let since = Instant::now();
    let asking = tokio::spawn({
        let cluster = cluster.clone();
        async move { cluster.is_live(THERE, since).await }
    });
    while script.questions.load(Ordering::Acquire) == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..100 {
        match tokio::time::timeout(LIVE_FOR / 2, cluster.is_live(THERE, since)).await {
            Ok(is_live) => assert!(is_live, "nothing says that it is gone"),
            // By then the question may have been old, so that this caller asked the next one.
            Err(_) => assert!(since.elapsed() > LIVE_FOR, "they do not wait"),
        }
    }
    let questions = script.questions.load(Ordering::Acquire);
    let most = 1 + since.elapsed().as_millis() / LIVE_FOR.as_millis();
    assert!(questions as u128 <= most, "a question without an answer is not repeated at once: {questions}");
    assert!(asking.await.unwrap());
    assert_eq!(script.questions.load(Ordering::Acquire), questions, "its caller does not repeat it either");

    script.is_silent.store(false, Ordering::Release);
    script.live.lock().unwrap().remove(&THERE);
    while cluster.is_live(THERE, since).await {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(
        cluster.is_live(THERE, Instant::now()).await,
        "an earlier answer says nothing about a host that has come"
    );
    assert!(cluster.is_live(HERE, since).await);
}
