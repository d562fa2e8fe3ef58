//! Schedules and events of an agent in the harness.

use std::time::Duration;

use skep_sdk::serde_json::json;
use skep_sdk::testing::{Emitted, Harness};
use skep_sdk::{AgentError, Alarm, Context, Message, Reply, ScheduleTiming, agent};

/// Reminds the user of the message text.
#[agent(on_alarm = remind)]
async fn reminder(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    match message.text.as_str() {
        "forget" => {
            let was_there = cx.schedule().cancel("remind");
            return Ok(Reply::text(was_there.to_string()));
        }
        "soon" => cx.schedule().after("remind", Duration::from_millis(10), &())?,
        "daily" => cx.schedule().tries(2).cron("digest", "0 7 * * *", "Europe/Berlin", &())?,
        text => cx.schedule().after("remind", Duration::from_secs(60), text)?,
    }
    cx.emit("reminder.set", &json!({"text": message.text}))?;
    if message.text == "fail" {
        return Err("it was told to fail".into());
    }
    Ok(Reply::text(cx.schedule().list().len().to_string()))
}

async fn remind(cx: &mut Context, alarm: Alarm) -> Result<(), AgentError> {
    cx.state().set("reminded", &alarm.json::<String>()?)?;
    Ok(cx.emit("skep.reserved", &())?)
}

#[test]
fn schedules_and_events_are_kept_only_if_the_turn_succeeds() {
    let mut harness = Harness::new(reminder);
    harness.send("fail").expect_err("the turn fails after setting a schedule");
    assert!(harness.schedules().is_empty() && harness.emitted().is_empty());
    assert_eq!(harness.send("tea").expect("the turn succeeds").reply.text, "1");
    let set = &harness.schedules()[0];
    assert_eq!((set.name.as_str(), set.data.clone()), ("remind", Some(json!("tea"))));
    assert_eq!(set.timing, ScheduleTiming::At(set.due_at_ms));
    let told = Emitted { topic: "reminder.set".into(), data: Some(json!({"text": "tea"})) };
    assert_eq!(harness.emitted(), [told]);
    assert_eq!(harness.send("daily").expect("the turn succeeds").reply.text, "2");
    assert_eq!(harness.send("forget").expect("the turn succeeds").reply.text, "true");
    assert_eq!(harness.send("forget").expect("the turn succeeds").reply.text, "false");
}

#[test]
fn rejects_what_the_host_would_reject() {
    let mut harness = Harness::new(reminder);
    let refused = harness.send("soon").expect_err("too soon");
    assert!(
        matches!(&refused, AgentError::Schedule(error) if error.to_string().contains("less than a second")),
        "{refused}"
    );
    harness.send("tea").expect("the turn succeeds");
    let refused = harness.alarm("remind", Some(json!("tea"))).expect_err("the topic is reserved");
    assert!(
        matches!(&refused, AgentError::Emit(error) if error.to_string().contains("reserved for the host")),
        "{refused}"
    );
    assert_eq!(harness.schedules().len(), 1, "a failed alarm keeps its schedule");
    assert_eq!(harness.state::<String>("reminded"), None);
}
