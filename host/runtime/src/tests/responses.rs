//! Tests of stored responses whose turns outlive their host.

use super::{
    durability::detached,
    fixture::{Host, tiny_engine, until},
    guest::spinner,
};
use crate::{NewResponse, ResponseEnd, ResponsePhase, ResponseTurn, RuntimeOptions};
use skep_engine::ModelSet;

const PRINCIPAL: &str = "local";

#[tokio::test(flavor = "multi_thread")]
async fn a_response_stays_open_while_the_agent_of_its_turn_cannot_be_called() {
    let host = Host::start().await;
    let manifest = "model = \"tiny\"\n[limits]\ncpu_ms = 60000";
    host.deploy("spin", manifest, spinner()).await.expect("valid");
    let spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken").turn_id().to_owned();
    let waits = host.agents.invoke(detached("spin", "hello")).await.expect("taken").turn_id().to_owned();
    let response = NewResponse {
        id: "resp_1".into(),
        principal: PRINCIPAL.into(),
        previous: None,
        thread: "t".into(),
        turn: Some(ResponseTurn { agent: "spin".into(), session: "s".into(), turn: waits }),
        request: Vec::new(),
    };
    host.agents.keep_response(response, None).await.expect("room");

    // The next host lacks the model of the agent.
    let models = ModelSet::new(tiny_engine("other"));
    let host = host.stop().await.start_with(models, RuntimeOptions::default()).await;
    host.agents.agent("spin").expect_err("its model is gone");
    host.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    host.agents.cancel_turn("spin", "s", &spins).await.expect("it runs again");
    let end = until(async || match host.agents.response(PRINCIPAL, "resp_1").await.expect("kept").phase {
        ResponsePhase::Ended { end, .. } => Some(end),
        ResponsePhase::Queued | ResponsePhase::Running => None,
    })
    .await;
    let ResponseEnd::Done(answer) = end else { panic!("{end:?}") };
    assert_eq!(answer.text, "hello");
}
