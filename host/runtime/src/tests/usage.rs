//! Tests of usage accounting: the usage of turns and batches, and daily budgets in money.

use super::{
    durability::{detached, long_talker},
    fixture::{Host, Setup, invocation, until},
    inference::{chatter, relayer},
};
use crate::{
    BatchItem, BatchRequest, BatchTerms, Clock, Invocation, NewBatch, Price, PriceList, RunEvent,
    RuntimeError, RuntimeOptions, TurnPhase, UsageBy, UsageCounts, UsageDay, UsageQuery, UsageReport,
};
use skep_engine::{
    Usage,
    chat::{ChatMessage, ChatOptions},
};

const DAY_MS: u64 = 86_400_000;
/// An hour before midnight, on 2024-10-03.
const START_MS: u64 = 20_000 * DAY_MS - 3_600_000;

/// Returns prices of the tiny model: input costs one millionth a token, cached input a tenth of it, and output
/// ten millionths.
fn prices(currency: &str) -> PriceList {
    let rate = |text: &str| text.parse().expect("a price");
    let price = Price {
        input: rate("1"),
        cached_input: rate("0.1"),
        cache_write: None,
        output: rate("10"),
        currency: currency.parse().expect("a currency"),
        from: "2024-01-01".parse().expect("a day"),
    };
    let mut prices = PriceList::default();
    prices.add("tiny", vec![price]).expect("a price");
    prices
}

fn with_budget(clock: &Clock, budget: &str, prices: PriceList) -> Setup {
    let tenant_money_per_day = [("local".to_owned(), budget.parse().expect("money"))].into();
    Setup::at(clock, RuntimeOptions { tenant_money_per_day, prices, ..RuntimeOptions::default() })
}

pub(super) async fn report(host: &Host, by: UsageBy) -> UsageReport {
    let query = UsageQuery { tenant: None, by, since: UsageDay::default(), until: host.agents.today() };
    host.agents.usage(&query).await.expect("readable")
}

fn counted(requests: u64, usage: &Usage) -> UsageCounts {
    UsageCounts {
        requests,
        input_tokens: usage.prompt_tokens.into(),
        cached_tokens: usage.cached_tokens.into(),
        output_tokens: usage.completion_tokens.into(),
        ..UsageCounts::default()
    }
}

#[tokio::test]
async fn turns_are_counted_by_agent_key_session_model_and_day() {
    let clock = Clock::at(START_MS);
    let options = RuntimeOptions { prices: prices("USD"), ..RuntimeOptions::default() };
    let host = Host::with(Setup::at(&clock, options)).await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let with_key =
        Invocation { key: Some("key-1".into()), ..invocation("chat", "s", "a message of a page or more") };
    let first = host.agents.invoke(with_key).await.expect("taken").outcome().await.expect("done").usage;
    clock.advance(DAY_MS);
    let second = host.ask("chat", "s", "and another").await.expect("done").usage;
    let third = host.ask("chat", "t", "hi").await.expect("done").usage;
    assert!(second.cached_tokens > 0, "{second:?}");

    let mut both = second;
    both.add(&third);
    let mut all = first;
    all.add(&both);
    let lines = async |by| -> Vec<(Option<String>, UsageCounts)> {
        let lines = report(&host, by).await.lines.into_iter();
        lines.map(|line| (line.name, line.counts)).collect()
    };
    let some = |name: &str| Some(name.to_owned());
    assert_eq!(lines(UsageBy::Agent).await, [(some("chat"), counted(3, &all))]);
    assert_eq!(lines(UsageBy::Model).await, [(some("tiny"), counted(3, &all))]);
    assert_eq!(lines(UsageBy::Tenant).await, [(some("local"), counted(3, &all))]);
    assert_eq!(lines(UsageBy::Key).await, [(None, counted(2, &both)), (some("key-1"), counted(1, &first))]);
    assert_eq!(
        lines(UsageBy::Day).await,
        [(some("2024-10-03"), counted(1, &first)), (some("2024-10-04"), counted(2, &both))]
    );
    let mut of_s = first;
    of_s.add(&second);
    assert_eq!(
        lines(UsageBy::Session).await,
        [(some("s"), counted(2, &of_s)), (some("t"), counted(1, &third))]
    );

    // By hand, in millionths: tokens that were computed × 1, cached ones × 0.1, output × 10.
    let UsageReport { total, .. } = report(&host, UsageBy::Agent).await;
    let tenths = 10 * u64::from(all.prompt_tokens - all.cached_tokens)
        + u64::from(all.cached_tokens)
        + 100 * u64::from(all.completion_tokens);
    let bill = total.bills[&"USD".parse().expect("a currency")];
    assert_eq!(bill.cost, format!("0.{tenths:07}").parse().expect("an amount"));
    assert_eq!(bill.saved, format!("0.{:07}", 9 * all.cached_tokens).parse().expect("an amount"));

    // After the retention, the sessions are part of their agent.
    host.agents.expire_sessions(START_MS + 40 * DAY_MS).await.expect("merged");
    assert_eq!(lines(UsageBy::Session).await, [(None, counted(3, &all))]);
    assert_eq!(lines(UsageBy::Agent).await, [(some("chat"), counted(3, &all))]);
    host.agents.expire_sessions(START_MS + 500 * DAY_MS).await.expect("removed");
    assert_eq!(lines(UsageBy::Agent).await, []);
}

#[tokio::test]
async fn usage_costs_what_its_model_cost_on_its_day_and_an_unknown_amount_before_the_first_price() {
    // Day 20_000 is 2024-10-04. The host starts two days before, without a price.
    let clock = Clock::at(START_MS - DAY_MS);
    let rate = |text: &str| text.parse().expect("a price");
    let list = prices("USD");
    let [old] = list.of_model("tiny") else { panic!("one price") };
    let old = Price { from: "2024-10-03".parse().expect("a day"), ..*old };
    // In the second price, input costs two millionths, cached input a half, and output twenty.
    let new = Price {
        input: rate("2"),
        cached_input: rate("0.5"),
        output: rate("20"),
        from: "2024-10-04".parse().expect("a day"),
        ..old
    };
    let mut list = PriceList::default();
    list.add("tiny", vec![new, old]).expect("prices");
    let host =
        Host::with(Setup::at(&clock, RuntimeOptions { prices: list, ..RuntimeOptions::default() })).await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    let mut used = Vec::new();
    for text in ["a message of a page or more", "and another", "and a third"] {
        used.push(host.ask("chat", "s", text).await.expect("done").usage);
        clock.advance(DAY_MS);
    }
    // By hand, in tenths of a millionth: computed × 10 or 20, cached × 1 or 5, output × 100 or 200.
    let tenths = |usage: &Usage, computed: u64, cached: u64, output: u64| {
        computed * u64::from(usage.prompt_tokens - usage.cached_tokens)
            + cached * u64::from(usage.cached_tokens)
            + output * u64::from(usage.completion_tokens)
    };
    let costs = [tenths(&used[1], 10, 1, 100), tenths(&used[2], 20, 5, 200)];
    assert!(
        used[1].cached_tokens > 0 && used[2].cached_tokens > 0 && used[2].completion_tokens > 0,
        "{used:?}"
    );
    let amount = |tenths: u64| format!("{}.{:07}", tenths / 10_000_000, tenths % 10_000_000);
    let days = report(&host, UsageBy::Day).await;
    let shown: Vec<_> = days
        .lines
        .iter()
        .map(|line| {
            let bill = line.bills.values().next().map(|bill| bill.cost);
            (line.name.as_deref().expect("a day"), bill, line.unpriced.counts.requests)
        })
        .collect();
    let cost = |tenths| Some(amount(tenths).parse().expect("an amount"));
    assert_eq!(
        shown,
        [("2024-10-02", None, 1), ("2024-10-03", cost(costs[0]), 0), ("2024-10-04", cost(costs[1]), 0)]
    );
    let usd = "USD".parse().expect("a currency");
    assert_eq!(Some(days.total.bills[&usd].cost), cost(costs[0] + costs[1]));
    assert_eq!(days.total.unpriced.counts, counted(1, &used[0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_cancelled_after_a_restart_is_counted_once_as_an_estimate() {
    // A generation may end before it can be cut off.
    for _ in 0..40 {
        let host = Host::start().await;
        host.deploy("talk", "", long_talker()).await.expect("valid");
        let mut handle = host.agents.invoke(detached("talk", "hello")).await.expect("taken");
        let id = handle.turn_id().to_owned();
        while !matches!(handle.next().await, None | Some(Ok(RunEvent::Delta { .. }))) {}
        let host = host.restart().await;
        host.agents.cancel_turn("talk", "s", &id).await.expect("known");
        until(async || {
            let phase = host.agents.turn("talk", "s", &id).await.expect("kept").phase;
            (!matches!(phase, TurnPhase::Running { .. } | TurnPhase::Waiting)).then_some(())
        })
        .await;
        let UsageCounts { requests, estimated_requests, output_tokens, .. } =
            report(&host, UsageBy::Agent).await.total.counts;
        // The turn may have ended before, or it may not have run again before it was cancelled.
        assert!(requests <= 1 && estimated_requests <= requests, "{requests} {estimated_requests}");
        if estimated_requests == 1 {
            assert!(output_tokens > 0, "the tokens before the restart are counted");
            return;
        }
    }
    panic!("no generation was cut off");
}

#[tokio::test]
async fn a_budget_in_money_ends_the_turns_of_its_tenant_until_midnight() {
    let clock = Clock::at(START_MS);
    let setup = || with_budget(&clock, "0.0005 USD", prices("USD"));
    let host = Host::with(setup()).await;
    host.deploy("relay", "", relayer()).await.expect("valid");
    let used_up = |result: Result<(), RuntimeError>| match result.expect_err("the day's money is used up") {
        RuntimeError::BudgetUsedUp(used_up) => used_up,
        other => panic!("unexpected error: {other}"),
    };
    let in_the_turn = used_up(host.ask("relay", "s", "hi").await.map(drop));
    let text = in_the_turn.to_string();
    assert!(text.contains("of its 0.0005 USD for today left"), "{text}");
    assert!(text.contains("`money_per_day` under [tenants.local] in skep.toml"), "{text}");
    assert_eq!(in_the_turn.retry_after_ms, 3_600_000);
    // The seed of a turn is random, and an answer may end after one token, which costs this much.
    let spent = report(&host, UsageBy::Agent).await.total.bills[&"USD".parse().expect("a currency")].cost;
    assert!(spent > "0.00001".parse().expect("an amount"), "{spent}");
    assert!(spent <= "0.0005".parse().expect("an amount"), "the worst case was reserved: {spent}");

    // The spent amount survives a restart, and another tenant has its own money.
    let host = host.restart_with(setup()).await;
    let again = used_up(host.ask("relay", "s", "hi").await.map(drop));
    assert_eq!(RuntimeError::from(again).code(), "money_used_up");
    let requests = report(&host, UsageBy::Agent).await.total.counts.requests;
    clock.advance(3_600_000);
    used_up(host.ask("relay", "s", "hi").await.map(drop));
    let since = report(&host, UsageBy::Agent).await.total.counts.requests - requests;
    assert!(since > 0, "there is money again on the next day");
}

#[tokio::test]
async fn a_budget_in_money_refuses_models_without_a_price_in_its_currency() {
    let clock = Clock::at(START_MS);
    for (prices, why) in
        [(PriceList::default(), "has no price for today"), (prices("EUR"), "is priced in EUR")]
    {
        let host = Host::with(with_budget(&clock, "5 USD", prices)).await;
        host.deploy("relay", "", relayer()).await.expect("valid");
        let error = host.ask("relay", "s", "hi").await.expect_err("refused");
        assert_eq!(error.code(), "price_unknown");
        let text = error.to_string();
        assert!(text.contains(why) && text.contains("hint: add the price under [prices.\"tiny\"]"), "{text}");
        assert_eq!(report(&host, UsageBy::Agent).await.lines, []);
    }
}

#[tokio::test]
async fn items_of_batches_are_counted_for_the_key_that_queued_them() {
    let host = Host::start().await;
    let options = Box::new(ChatOptions { max_tokens: Some(4), ignore_eos: true, ..ChatOptions::default() });
    let request = BatchRequest::Chat { messages: vec![ChatMessage::user("hi")], options, choices: 1 };
    let item = BatchItem { request, form: String::new(), reference: None, keep: None };
    let batch = NewBatch {
        principal: "local".into(),
        key: Some("key-2".into()),
        model: "tiny".into(),
        items: vec![item; 3],
        terms: BatchTerms::default(),
    };
    host.agents.queue_batch(batch).await.expect("taken");
    let counts = until(async || {
        let lines = report(&host, UsageBy::Key).await.lines;
        let line = lines.into_iter().find(|line| line.name.as_deref() == Some("key-2"))?;
        (line.counts.requests == 3).then_some(line.counts)
    })
    .await;
    assert_eq!((counts.output_tokens, counts.estimated_requests), (12, 0));
    assert!(counts.input_tokens > 3, "{counts:?}");
}
