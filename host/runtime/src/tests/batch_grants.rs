//! Tests of the grants of models that items of batches need when they run, not only when they are queued.

use super::{
    fixture::{Host, until},
    upstreams::{Scripted, Step, models},
};
use crate::{
    BatchItem, BatchOptions, BatchOutcome, BatchRequest, BatchTerms, ModelGrant, NewApiKey, NewBatch,
    NewResponse, ResponseEnd, ResponsePhase, Role, RuntimeOptions, Tenant, response_id,
};
use skep_engine::{
    Model, ModelDigest, RemoteInfo, RemoteModel,
    chat::{ChatMessage, ChatOptions, Input, RemoteStream},
};
use std::sync::Arc;

/// A route that may choose these models. Nobody should ask it.
struct Route {
    info: RemoteInfo,
    members: Vec<String>,
}

impl Route {
    fn of(members: &[&str]) -> Model {
        let info = RemoteInfo {
            name: "smart".to_owned(),
            digest: ModelDigest::default(),
            context_length: None,
            created_unix_s: 0,
        };
        let members = members.iter().map(ToString::to_string).collect();
        Model::Remote(Arc::new(Route { info, members }))
    }
}

impl RemoteModel for Route {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn members(&self) -> Vec<String> {
        self.members.clone()
    }

    fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
        panic!("the route was asked")
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

/// Returns options with the models of `acme`, if it has any of its own. One item runs at a time.
fn options(acme: Option<&str>) -> RuntimeOptions {
    let granted = |name: &str| ModelGrant::try_from(name.to_owned()).expect("a grant");
    let tenant_models = acme.map(|name| ("acme".to_owned(), vec![granted(name)])).into_iter().collect();
    let batch = BatchOptions { max_running: 1, ..BatchOptions::default() };
    RuntimeOptions { batch, tenant_models, ..RuntimeOptions::default() }
}

fn batch(principal: &str, key: Option<&str>, model: &str) -> NewBatch {
    let messages = vec![ChatMessage::user("hi")];
    let request = BatchRequest::Chat { messages, options: Box::default(), choices: 1 };
    NewBatch {
        principal: principal.to_owned(),
        key: key.map(str::to_owned),
        model: model.to_owned(),
        items: vec![BatchItem { request, form: "plain".to_owned(), reference: None, keep: None }],
        terms: BatchTerms::default(),
    }
}

async fn queue(host: &Host, principal: &str, key: Option<&str>, model: &str) -> String {
    host.agents.queue_batch(batch(principal, key, model)).await.expect("room").id
}

/// Returns the outcome of the only item of a batch.
async fn outcome(host: &Host, principal: &str, id: &str) -> BatchOutcome {
    let ended = async || host.agents.batch_results(principal, id).await.expect("known").1;
    until(ended).await.items.remove(0).outcome
}

fn assert_not_granted(outcome: &BatchOutcome, setting: &str) {
    let BatchOutcome::Failed { code, message } = outcome else { panic!("{outcome:?}") };
    assert_eq!(*code, "model_not_granted");
    assert!(message.contains("may not use the model far/model") && message.contains(setting), "{message}");
}

/// Starts a host whose only slot for items is taken until the batch with the returned id is cancelled.
async fn occupied(remote: &Arc<Scripted>, more: Option<Model>) -> (Host, String) {
    let models = models(remote);
    let models = more.into_iter().fold(models, |models, model| models.with(model));
    let host = Host::with_models(models, options(Some("far/*"))).await;
    let hangs = queue(&host, "local", None, "far/model").await;
    until(async || (remote.asked().len() == 1).then_some(())).await;
    (host, hangs)
}

#[tokio::test]
async fn an_item_whose_grant_was_taken_away_while_it_waited_is_not_sent_to_its_upstream() {
    let remote = Scripted::new(
        None,
        vec![vec![Step::Say("One"), Step::Hang], vec![Step::Say("For the operator."), Step::Finish]],
    );
    let (host, hangs) = occupied(&remote, None).await;
    let key = |role| NewApiKey {
        tenant: Tenant::local(),
        role,
        agents: None,
        name: String::new(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    };
    let keys = host.agents.keys();
    let admin = keys.create(key(Role::Admin)).await.expect("created").0.id;
    let revoked = keys.create(key(Role::Admin)).await.expect("created").0.id;
    let client = keys.create(key(Role::Invoke)).await.expect("created").0.id;
    let of_tenant = queue(&host, "acme", None, "far/model").await;
    let response = response_id();
    let new = NewResponse {
        id: response.clone(),
        principal: "acme".to_owned(),
        previous: None,
        thread: response.clone(),
        turn: None,
        request: b"{}".to_vec(),
    };
    host.agents.queue_response(new, batch("acme", None, "far/model")).await.expect("room");
    let of_admin = queue(&host, "local", Some(&admin), "far/model").await;
    let of_revoked = queue(&host, "local", Some(&revoked), "far/model").await;
    let of_client = queue(&host, "local", Some(&client), "far/model").await;

    keys.revoke(&revoked).await.expect("known");
    host.agents.set_rules(&options(None)).await;
    host.agents.cancel_batch("local", &hangs).await.expect("known");
    assert_not_granted(&outcome(&host, "acme", &of_tenant).await, "[tenants.acme]");
    assert_not_granted(&outcome(&host, "local", &of_revoked).await, "[tenants.local]");
    assert_not_granted(&outcome(&host, "local", &of_client).await, "[tenants.local]");
    let ended = async || match host.agents.response("acme", &response).await.expect("known").phase {
        ResponsePhase::Ended { end, .. } => Some(end),
        _ => None,
    };
    let end = until(ended).await;
    assert!(matches!(end, ResponseEnd::Failed { code: "model_not_granted", .. }), "{end:?}");
    let outcome = outcome(&host, "local", &of_admin).await;
    assert!(
        matches!(&outcome, BatchOutcome::Done(answer) if answer.text == "For the operator."),
        "{outcome:?}"
    );
    assert_eq!(remote.asked().len(), 2, "the upstream was asked by the operator only");
}

#[tokio::test]
async fn an_item_is_not_sent_to_a_route_that_got_an_upstream_while_it_waited() {
    let remote = Scripted::new(None, vec![vec![Step::Say("One"), Step::Hang]]);
    let (host, hangs) = occupied(&remote, Some(Route::of(&["tiny"]))).await;
    let id = queue(&host, "globex", None, "smart").await;
    let _ = host.agents.models().clone().with(Route::of(&["tiny", "far/model"]));
    host.agents.cancel_batch("local", &hangs).await.expect("known");
    assert_not_granted(&outcome(&host, "globex", &id).await, "[tenants.globex]");
    assert_eq!(remote.asked().len(), 1);
}
