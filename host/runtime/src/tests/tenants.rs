//! Tests of resources that tenants share: a tenant that takes all it can get leaves a share for
//! others.

use super::{
    fixture::{Host, invocation, until},
    web::{EVERYWHERE, ReceivedRequest, Server, fetcher, granting},
};
use crate::{
    BatchItem, BatchOptions, BatchRequest, BatchTerms, Invocation, NewApiKey, NewBatch, Role, RunHandle,
    RuntimeError, RuntimeOptions, Tenant,
};

/// Starts a server that does not answer by itself, and a host whose agent `web` may send requests
/// to it. The host has two tenants.
async fn start(change: impl FnOnce(&mut RuntimeOptions), limits: &str) -> (Host, Server) {
    let server = Server::start().await;
    let mut options = granting(&["*"]);
    change(&mut options);
    let host = Host::with(options).await;
    host.deploy("web", &format!("{EVERYWHERE}\n{limits}"), fetcher()).await.expect("valid");
    for tenant in ["greedy", "small"] {
        let new = NewApiKey {
            tenant: Tenant::new(tenant).expect("a name"),
            role: Role::Invoke,
            agents: None,
            name: String::new(),
            expires_in: None,
            requests_per_minute: None,
            bodies: false,
        };
        host.agents.keys().create(new).await.expect("made");
    }
    (host, server)
}

/// Starts a turn that waits for the server. The URL names the tenant.
async fn waiting(
    host: &Host,
    server: &Server,
    tenant: &str,
    number: usize,
) -> Result<RunHandle, RuntimeError> {
    let url = format!("http://{}/{tenant}", server.address);
    let session = format!("{tenant}/{number}");
    host.agents.invoke(Invocation { principal: tenant.into(), ..invocation("web", &session, &url) }).await
}

async fn many(host: &Host, server: &Server, count: usize) -> Vec<RunHandle> {
    let mut turns = Vec::new();
    for number in 0..count {
        turns.push(waiting(host, server, "greedy", number).await.expect("taken"));
    }
    turns
}

/// Answers the small tenant's request. Earlier requests of others stay open while the returned
/// value is kept.
async fn answer_small(server: &mut Server) -> Vec<ReceivedRequest> {
    let mut others = Vec::new();
    loop {
        let asked = server.next().await;
        if asked.head.starts_with("GET /small ") {
            asked.answer("pong").await;
            return others;
        }
        others.push(asked);
    }
}

/// Checks that the small tenant's turn reaches the server and completes.
async fn is_served(server: &mut Server, turn: RunHandle) {
    let _others = answer_small(server).await;
    assert_eq!(turn.outcome().await.expect("the turn succeeds").text, "pong");
}

#[tokio::test]
async fn a_tenant_with_many_turns_of_an_agent_leaves_some_for_others() {
    let (host, mut server) = start(|_| {}, "[limits]\nconcurrent_turns = 4").await;
    let _turns = many(&host, &server, 3).await;
    let refused = waiting(&host, &server, "greedy", 3).await.expect_err("the fourth is for others");
    assert_eq!(refused.code(), "too_many_turns");
    assert!(refused.to_string().contains("share"), "{refused}");
    let small = waiting(&host, &server, "small", 0).await.expect("there is room");
    is_served(&mut server, small).await;
}

#[tokio::test]
async fn a_tenant_with_many_turns_leaves_instance_slots_for_others() {
    let (host, mut server) = start(|options| options.max_instances = 4, "").await;
    let _turns = many(&host, &server, 6).await;
    let small = waiting(&host, &server, "small", 0).await.expect("taken");
    is_served(&mut server, small).await;
}

#[tokio::test]
async fn a_tenant_with_many_requests_leaves_connections_for_others() {
    let (host, mut server) = start(|options| options.outbound.max_running = 4, "").await;
    let _turns = many(&host, &server, 6).await;
    let small = waiting(&host, &server, "small", 0).await.expect("taken");
    is_served(&mut server, small).await;
}

fn batch(server: &Server, tenant: &str, items: usize) -> NewBatch {
    let url = format!("http://{}/{tenant}", server.address);
    let item = BatchItem {
        request: BatchRequest::Turn { text: url, data: None },
        form: String::new(),
        reference: None,
        keep: None,
    };
    NewBatch {
        principal: tenant.into(),
        key: None,
        model: "agent:web".into(),
        items: vec![item; items],
        terms: BatchTerms::default(),
    }
}

#[tokio::test]
async fn a_tenant_with_a_large_batch_leaves_slots_for_others() {
    let batches = BatchOptions { max_running: 4, ..BatchOptions::default() };
    let (host, mut server) = start(|options| options.batch = batches, "").await;
    host.agents.queue_batch(batch(&server, "greedy", 20)).await.expect("room");
    let id = host.agents.queue_batch(batch(&server, "small", 1)).await.expect("room").id;
    let others = answer_small(&mut server).await;
    let (_, results) = until(async || {
        Some(host.agents.batch_results("small", &id).await.expect("known")).filter(|(_, r)| r.is_some())
    })
    .await;
    assert_eq!(results.expect("the batch has ended").status.items.done, 1);
    assert!(others.len() <= 3, "{}", others.len());
}

#[tokio::test]
async fn a_tenant_with_many_batches_leaves_room_for_those_of_others() {
    let batches = BatchOptions { max_batches: 4, ..BatchOptions::default() };
    let (host, server) = start(|options| options.batch = batches, "").await;
    for _ in 0..3 {
        host.agents.queue_batch(batch(&server, "greedy", 1)).await.expect("room");
    }
    let refused =
        host.agents.queue_batch(batch(&server, "greedy", 1)).await.expect_err("the rest is for others");
    assert_eq!(refused.code(), "queue_full");
    host.agents.queue_batch(batch(&server, "small", 1)).await.expect("room");
}
