//! Tests of daily token budgets of agents and tenants: refusal when used up, restarts, and reset at
//! midnight.

use super::{
    durability::{detached, talker},
    fixture::{Host, Setup, invocation},
    inference::{chatter, relayer},
};
use crate::{BudgetUsedUp, Clock, Limits, RunEvent, RuntimeError, RuntimeOptions};

const DAY_MS: u64 = 86_400_000;
/// An hour before midnight.
const START_MS: u64 = 20_000 * DAY_MS - 3_600_000;

fn setup(clock: &Clock) -> Setup {
    Setup::at(clock, RuntimeOptions::default())
}

fn used_up<T>(result: Result<T, RuntimeError>) -> BudgetUsedUp {
    match result.err().expect("the day's tokens are used up") {
        RuntimeError::BudgetUsedUp(used_up) => used_up,
        other => panic!("unexpected error: {other}"),
    }
}

#[tokio::test]
async fn an_agents_budget_can_run_out_within_a_turn_and_resets_at_midnight() {
    let clock = Clock::at(START_MS);
    let host = Host::with(setup(&clock)).await;
    host.deploy("relay", "[limits]\ntokens_per_day = 12", relayer()).await.expect("valid");
    host.deploy("chat", "", chatter()).await.expect("valid");
    let in_the_turn = used_up(host.ask("relay", "s", "hi").await);
    assert_eq!(in_the_turn.retry_after_ms, 3_600_000);

    // The tokens of a failed turn count too, and survive a restart.
    let host = host.restart_with(setup(&clock)).await;
    let before_the_turn = used_up(host.invoke("relay", "s", "hi").await);
    assert!(before_the_turn.to_string().contains("`tokens_per_day` under [limits] in agent.toml"));
    used_up(host.agents.invoke(detached("relay", "hi")).await);
    host.ask("chat", "s", "hi").await.expect("another agent has a separate budget");

    clock.advance(3_600_000);
    used_up(host.invoke("relay", "s", "hi").await.expect("a new day").outcome().await);
    let host = host.restart_with(setup(&clock)).await;
    used_up(host.invoke("relay", "s", "hi").await);
}

#[tokio::test]
async fn a_tenants_budget_covers_all_agents_and_is_separate_per_tenant() {
    let clock = Clock::at(START_MS);
    let with = |tenants: &[(&str, u32)]| {
        let tenants = tenants.iter().map(|(name, tokens)| ((*name).into(), *tokens));
        let options =
            RuntimeOptions { tenant_tokens_per_day: tenants.collect(), ..RuntimeOptions::default() };
        Setup::at(&clock, options)
    };
    let host = Host::with(with(&[("local", 8), ("default", 1_000)])).await;
    for name in ["one", "two"] {
        host.deploy(name, "", relayer()).await.expect("valid");
    }
    used_up(host.ask("one", "s", "hi").await);
    let host = host.restart_with(with(&[("local", 8), ("default", 1_000)])).await;
    let refused = used_up(host.invoke("two", "s", "hi").await).to_string();
    assert!(refused.contains("`tokens_per_day` under [tenants.local] in skep.toml"), "{refused}");
    let of_acme = crate::Invocation { principal: "acme".into(), ..invocation("two", "acme/s", "hi") };
    host.agents.invoke(of_acme).await.expect("the tenant has a separate budget");
    let host = host.restart_with(with(&[])).await;
    host.invoke("two", "other", "hi").await.expect("no budget is configured");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_turn_completes_although_the_budget_is_used_up() {
    let clock = Clock::at(START_MS);
    let host = Host::with(setup(&clock)).await;
    host.deploy("talk", "", talker()).await.expect("valid");
    let mut handle = host.agents.invoke(detached("talk", "hello")).await.expect("taken");
    let id = handle.turn_id().to_owned();
    while !matches!(handle.next().await, None | Some(Ok(RunEvent::Delta { .. }))) {}
    let ceilings = Limits { tokens_per_day: 1, ..Limits::default() };
    let options = RuntimeOptions { ceilings, ..RuntimeOptions::default() };
    let host = host.restart_with(Setup::at(&clock, options)).await;
    let outcome = host.agents.follow("talk", "s", &id).await.expect("kept").outcome().await;
    // A random answer may end with its first token.
    assert!(outcome.expect("the turn is resumed").usage.completion_tokens > 0);
    used_up(host.invoke("talk", "s", "hello").await);
}
