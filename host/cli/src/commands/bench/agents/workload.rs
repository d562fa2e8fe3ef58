//! The conversations of the sessions: the front desk of a public library, whose assistant works with five
//! tools.
//!
//! The system prompt is long and the same for all sessions of a desk, as with real agents; everything that differs
//! comes after it. Calls are checked here once more, with types that know nothing of the grammar that the
//! server enforced.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

/// Maximum number of tokens of a tool call; the longest one fits.
pub const MAX_CALL_TOKENS: u32 = 120;

const INTRODUCTION: &str = "\
You are the assistant at the front desk of a public library with three branches. You get things done by calling tools. \
For a request, pick the one tool that serves it and reply with a JSON object that holds the tool's name and its \
arguments. Once the result of the tool is shown to you, tell the visitor in one or two plain sentences what it means \
for them. Use no tool that is not listed here, leave no argument out, and keep every text short.";

const RULES: [&str; 8] = [
    "Speak plainly and kindly, and in the language of the visitor.",
    "Give dates as day, month and year, and times on the clock of 24 hours.",
    "A book that is out can be held; offer that before anything else.",
    "Fines are not discussed at the desk; report them as a fault of low severity.",
    "Never read a card number aloud, not even in part.",
    "Groups of more than ten visitors need an appointment.",
    "The harbour branch is closed in the morning; name another branch then.",
    "When a tool finds nothing, say so and propose one thing to try instead.",
];

/// A tool of the assistant.
struct Tool {
    name: &'static str,
    purpose: &'static str,
    /// Schemas of its arguments, by name.
    properties: fn() -> Value,
}

const TOOLS: [Tool; 5] = [
    Tool {
        name: "find_book",
        purpose: "Search the catalogue of all branches for a title and list what is on the shelf.",
        properties: || json!({"title": {"type": "string", "maxLength": 32}, "results": {"type": "integer", "minimum": 1, "maximum": 9}}),
    },
    Tool {
        name: "hold_copy",
        purpose: "Put a copy aside for a reader at the branch where it will be fetched.",
        properties: || json!({"reader": {"type": "string", "maxLength": 24}, "branch": {"enum": ["main", "north", "harbour"]}}),
    },
    Tool {
        name: "report_fault",
        purpose: "Report something broken in the building to the caretaker, with how bad it is.",
        properties: || json!({"what": {"type": "string", "maxLength": 40}, "severity": {"enum": ["low", "normal", "high"]}}),
    },
    Tool {
        name: "renew_loan",
        purpose: "Renew a loan by its number, and send the reader a note about it if they like.",
        properties: || json!({"loan": {"type": "string", "maxLength": 24}, "notify": {"type": "boolean"}}),
    },
    Tool {
        name: "plan_visit",
        purpose: "Make an appointment for a group of visitors on a day of the week.",
        properties: || json!({"visitors": {"type": "integer", "minimum": 1, "maximum": 60}, "day": {"enum": ["mon", "tue", "wed", "thu", "fri", "sat"]}}),
    },
];

/// One turn: the request of the user, the tool that serves it, and the result of the tool.
pub struct Task {
    pub tool: &'static str,
    pub ask: &'static str,
    pub result: &'static str,
}

const TASKS: [Task; 5] = [
    Task {
        tool: "find_book",
        ask: "Do you have The Salt Road somewhere? I would like to see the first four copies that you find.",
        result: r#"{"copies":[{"shelf":"N-204","branch":"north","in":true},{"shelf":"M-017","branch":"main","in":false,"due":"2026-03-14"}]}"#,
    },
    Task {
        tool: "hold_copy",
        ask: "Please keep it for Ines Oliveira, she will come by the main branch tomorrow after work.",
        result: r#"{"held":true,"until":"2026-03-09","queue":0,"slip":"H-5521"}"#,
    },
    Task {
        tool: "report_fault",
        ask: "The lift beside the reading room has been stuck since this morning and somebody in a wheelchair is upstairs.",
        result: r#"{"ticket":"C-880","caretaker":"on the way","minutes":15}"#,
    },
    Task {
        tool: "renew_loan",
        ask: "I am not done with loan L-30417 yet. Could I have it for longer, and get a note when that is settled?",
        result: r#"{"renewed":true,"due":"2026-04-02","renewals_left":1}"#,
    },
    Task {
        tool: "plan_visit",
        ask: "Our school would like to bring two classes, forty-five children in all, next Wednesday in the forenoon.",
        result: r#"{"booked":true,"branch":"main","from":"10:00","guide":"T. Brandt"}"#,
    },
];

/// Returns the task of a turn. Sessions start with different tasks.
pub fn task(session: u32, turn: u32) -> &'static Task {
    &TASKS[(session as usize + turn as usize) % TASKS.len()]
}

/// Desks of the mixed workload, each with a system prompt that differs from the first word on.
pub const DESKS: [&str; 8] = ["Aveiro", "Braga", "Coimbra", "Faro", "Guarda", "Lagos", "Porto", "Sintra"];

/// Returns how long the tool of a turn takes in the mixed workload: 50 to 500 ms, the same in every run.
pub fn tool_time(session: u32, turn: u32) -> Duration {
    let mixed = (u64::from(session) << 32 | u64::from(turn)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Duration::from_millis(50 + (mixed >> 32) % 451)
}

/// Returns the system prompt of the conversations at a desk, or of all conversations.
pub fn system_prompt(desk: Option<&str>) -> String {
    let desk = desk.map_or_else(String::new, |town| format!("{town}: "));
    let tools = TOOLS.iter().map(|tool| {
        let schema = serde_json::to_string(&schema(tool)).expect("a JSON value");
        format!("- {}: {}\n  Schema of its call: {schema}\n", tool.name, tool.purpose)
    });
    let rules = RULES.iter().enumerate().map(|(index, rule)| format!("{}. {rule}\n", index + 1));
    format!(
        "{desk}{INTRODUCTION}\n\nTools:\n{}\nRules:\n{}",
        tools.collect::<String>(),
        rules.collect::<String>()
    )
}

/// Returns the `response_format` for a call of `tool`.
pub fn response_format(tool: &str) -> Value {
    let tool = TOOLS.iter().find(|known| known.name == tool).expect("tasks name tools");
    json!({"type": "json_schema", "json_schema": {"name": tool.name, "strict": true, "schema": schema(tool)}})
}

fn schema(tool: &Tool) -> Value {
    let properties = (tool.properties)();
    let required: Vec<&String> = properties.as_object().expect("an object").keys().collect();
    let arguments = json!({"type": "object", "additionalProperties": false, "required": required, "properties": properties});
    json!({"type": "object", "additionalProperties": false, "required": ["tool", "arguments"],
           "properties": {"tool": {"const": tool.name}, "arguments": arguments}})
}

/// A call as the schemas describe it.
#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "some fields are only checked by their type")]
#[serde(tag = "tool", content = "arguments", rename_all = "snake_case", deny_unknown_fields)]
enum Call {
    FindBook { title: String, results: u32 },
    HoldCopy { reader: String, branch: Branch },
    ReportFault { what: String, severity: Severity },
    RenewLoan { loan: String, notify: bool },
    PlanVisit { visitors: u32, day: Day },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Branch {
    Main,
    North,
    Harbour,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Severity {
    Low,
    Normal,
    High,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Day {
    Mon,
    Tue,
    Wed,
    Thu,
    Fri,
    Sat,
}

/// Returns whether `text` is a call of `tool` that its schema allows.
pub fn is_call_of(tool: &str, text: &str) -> bool {
    // The types alone would accept an array in place of an object.
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    if value["tool"] != tool || !value["arguments"].is_object() {
        return false;
    }
    match serde_json::from_value(value) {
        Ok(Call::FindBook { title, results }) => fits(&title, 32) && (1..=9).contains(&results),
        Ok(Call::HoldCopy { reader, .. }) => fits(&reader, 24),
        Ok(Call::ReportFault { what, .. }) => fits(&what, 40),
        Ok(Call::RenewLoan { loan, .. }) => fits(&loan, 24),
        Ok(Call::PlanVisit { visitors, .. }) => (1..=60).contains(&visitors),
        Err(_) => false,
    }
}

/// Compares lengths in characters, as JSON Schema does, and not in bytes.
fn fits(text: &str, characters: usize) -> bool {
    text.chars().count() <= characters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_their_schema_allows_are_valid() {
        let call = |tool: &str, arguments: Value| json!({"tool": tool, "arguments": arguments}).to_string();
        for good in [
            call("find_book", json!({"title": "é".repeat(32), "results": 9})),
            call("hold_copy", json!({"branch": "harbour", "reader": ""})),
            call("report_fault", json!({"what": "lift", "severity": "high"})),
            call("renew_loan", json!({"loan": "L-1", "notify": false})),
            call("plan_visit", json!({"visitors": 60, "day": "sat"})),
        ] {
            let tool = TOOLS.iter().find(|tool| good.contains(tool.name)).expect("its tool");
            assert!(is_call_of(tool.name, &good), "{good}");
            assert!(!is_call_of("another", &good), "{good}");
        }
        for bad in [
            call("find_book", json!({"title": "x".repeat(33), "results": 1})),
            call("find_book", json!({"title": "x", "results": 0})),
            call("find_book", json!({"title": "x", "results": 10})),
            call("find_book", json!({"title": "x", "results": 1.5})),
            call("find_book", json!({"title": "x", "results": "1"})),
            call("find_book", json!({"title": "x"})),
            call("find_book", json!({"title": "x", "results": 1, "more": 1})),
            call("find_book", json!(["x", 1])),
            json!({"tool": "find_book", "arguments": {"title": "x", "results": 1}, "more": 1}).to_string(),
            "{\"tool\": \"find_book\", \"arguments\": {\"title\": \"x\", \"resul".to_owned(),
        ] {
            assert!(!is_call_of("find_book", &bad), "{bad}");
        }
        assert!(!is_call_of("hold_copy", &call("hold_copy", json!({"reader": "x", "branch": "south"}))));
        assert!(!is_call_of("renew_loan", &call("renew_loan", json!({"loan": "x", "notify": "yes"}))));
    }

    #[test]
    fn every_task_has_a_tool_and_every_tool_is_in_the_prompt() {
        let prompt = system_prompt(None);
        for (index, tool) in TOOLS.iter().enumerate() {
            assert!(prompt.contains(&serde_json::to_string(&schema(tool)).expect("JSON")), "{}", tool.name);
            assert!(TASKS.iter().any(|task| task.tool == tool.name), "{}", tool.name);
            let index = u32::try_from(index).expect("few");
            assert_eq!(response_format(task(index, 0).tool)["json_schema"]["name"], task(index, 0).tool);
        }
    }
}
