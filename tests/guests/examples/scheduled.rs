//! Sets alarms and emits events, and counts in its state the alarms and events that it received, by name. A
//! message `set N` sets N alarms, due in a second or, with `set N MS`, in MS milliseconds. `emit N` emits N
//! events for this session. The reply's data has the counts.

use std::collections::BTreeMap;
use std::time::Duration;

use skep_sdk::serde_json::json;
use skep_sdk::{AgentError, Alarm, Context, Event, Message, Reply, agent};

/// Counts its alarms and events.
#[agent(on_alarm = ring, on_event = take)]
async fn scheduled(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let mut words = message.text.split(' ');
    let command = words.next().unwrap_or_default();
    let mut number = |otherwise: u64| match words.next() {
        Some(word) => word.parse().map_err(|_| AgentError::InvalidMessage("N and MS are numbers".into())),
        None => Ok(otherwise),
    };
    let (count, after_ms) = (number(0)?, number(1_000)?);
    for number in 0..count {
        match command {
            "set" => cx.schedule().after(
                &format!("alarm {number}"),
                Duration::from_millis(after_ms + 20 * number),
                &number,
            )?,
            _ => cx.emit("counted.emitted", &json!({"session": cx.session(), "number": number}))?,
        }
    }
    let taken: BTreeMap<String, u32> = cx.state().get_or_default("taken")?;
    Reply::json("", &taken)
}

async fn ring(cx: &mut Context, alarm: Alarm) -> Result<(), AgentError> {
    count(cx, alarm.name)
}

async fn take(cx: &mut Context, event: Event) -> Result<(), AgentError> {
    let data: BTreeMap<String, skep_sdk::serde_json::Value> = event.json()?;
    count(cx, format!("{} {}", event.topic, data["number"]))
}

fn count(cx: &Context, what: String) -> Result<(), AgentError> {
    let mut taken: BTreeMap<String, u32> = cx.state().get_or_default("taken")?;
    *taken.entry(what).or_default() += 1;
    Ok(cx.state().set("taken", &taken)?)
}
