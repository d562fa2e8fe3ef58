//! `skep requests`: the log of requests to models.

use std::time::Duration;

use anyhow::{Context as _, Result};
use skep_api::{ModelRequest, RequestMessage, RequestTexts};
use skep_runtime::{Amount, for_terminal};

use super::follow::follow;
use super::logs::{age, ms_before_now, time_of_day};
use super::{HostArgs, out};
use crate::client::{Client, RequestQuery};
use crate::style;

/// Decimals of amounts. JSON has them exactly.
const DECIMALS: usize = 6;
/// Maximum number of records of one page.
const PAGE: u32 = 200;

/// List requests to models with their result, duration, tokens and cost
///
/// A host logs requests only if skep.toml says so: `log = "metadata"` under [requests] logs everything but
/// prompts and answers, and `log = "full"` logs these as well, with secrets taken out. A tenant can have its
/// own setting: `requests` under [tenants.NAME]. Records are kept for `retention_days`, up to `max_mb`.
///
/// With an ID, one record is shown with its prompt and answer. Reading and searching these needs a key that was
/// created with `skep key create --bodies`, or a host without keys. An admin sees all tenants, and other keys
/// see their own. It is a log and not the accounting, which `skep usage` shows: under heavy load a host may drop
/// records. Times are in UTC.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep requests                                   the newest ones
  skep requests --follow --model smart            new ones, as they end
  skep requests --status failed --since 1h
  skep requests --agent concierge --session ada --search refund
  skep requests req_0198c0ffee                    one of them, with its texts
  skep requests --jsonl --bodies --since 1d > requests.jsonl
  skep requests --jsonl | jq -r 'select(.timing.total_ms > 5000) | .id'")]
pub struct Args {
    /// Show this record with its prompt and answer
    #[arg(conflicts_with_all = ["follow", "jsonl", "model", "agent", "session", "tenant", "key", "status", "error",
        "since", "until", "search", "limit"])]
    id: Option<String>,
    #[command(flatten)]
    filters: Filters,
    /// Print new records as they are stored, until Ctrl-C
    #[arg(long, short)]
    follow: bool,
    /// Maximum number of records; the newest are printed [default: 50, with --jsonl all]
    #[arg(long, short = 'n', conflicts_with = "follow", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Print all records, the oldest first, as one JSON object per line
    #[arg(long)]
    jsonl: bool,
    /// With --jsonl, prompts and answers as well
    #[arg(long, requires = "jsonl")]
    bodies: bool,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long, conflicts_with = "jsonl")]
    json: bool,
}

/// Selects requests.
#[derive(Debug, clap::Args)]
struct Filters {
    /// Only requests that asked for this model, alias or route, or that this model answered
    #[arg(long)]
    model: Option<String>,
    /// Only requests of this agent
    #[arg(long)]
    agent: Option<String>,
    /// Only requests of this session
    #[arg(long)]
    session: Option<String>,
    /// Only requests of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only requests that the API key with this id sent
    #[arg(long, value_name = "KEY_ID")]
    key: Option<String>,
    /// Only requests with this result
    #[arg(long, value_parser = ["ok", "failed", "cancelled"])]
    status: Option<String>,
    /// Only requests that failed with this code, such as upstream_unavailable
    #[arg(long, value_name = "CODE")]
    error: Option<String>,
    /// Only requests that are not older than this, such as 90s, 10m, 2h or 1d
    #[arg(long, value_name = "AGE", value_parser = age)]
    since: Option<Duration>,
    /// Only requests that are older than this
    #[arg(long, value_name = "AGE", value_parser = age)]
    until: Option<Duration>,
    /// Only requests whose prompt or answer contains this text, ignoring case
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
}

const COLUMNS: [&str; 9] = ["TIME", "ID", "FROM", "MODEL", "RESULT", "TOKENS", "FIRST", "TOTAL", "COST"];

/// Prints one record of the log, the newest ones, or those that are added from now on.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    if let Some(id) = &args.id {
        let request = client.model_request(id).await?;
        return if args.json { out::json(&request) } else { out::line(&shown(&request)) };
    }
    let query = args.filters.query(args.bodies);
    if args.follow {
        let is_json = args.json || args.jsonl;
        let print = |request: &ModelRequest| match is_json {
            true => out::json_line(request),
            false => out::line(&row(request).join("  ")),
        };
        return follow(async |last| client.follow_requests(&query, last).await, print).await;
    }
    if args.jsonl {
        return export(&client, &query, args.limit).await;
    }
    let requests = newest(&client, &query, args.limit.unwrap_or(50)).await?;
    if args.json {
        return out::json(&requests);
    }
    if requests.is_empty() {
        return out::line(
            "no requests for this query; a host logs them if skep.toml has `log = \"metadata\"` under [requests]",
        );
    }
    out::table(COLUMNS, &requests.iter().map(row).collect::<Vec<_>>())
}

impl Filters {
    fn query(self, bodies: bool) -> RequestQuery {
        RequestQuery {
            model: self.model,
            agent: self.agent,
            session: self.session,
            tenant: self.tenant,
            key: self.key,
            status: self.status,
            error: self.error,
            since_ms: self.since.map(ms_before_now),
            until_ms: self.until.map(ms_before_now),
            search: self.search,
            bodies,
        }
    }
}

/// Returns the newest records. A page may end early, so several may be needed.
async fn newest(client: &Client, query: &RequestQuery, limit: u32) -> Result<Vec<ModelRequest>> {
    let (mut requests, mut cursor) = (Vec::new(), None::<String>);
    loop {
        let left = limit - requests.len() as u32;
        let page = client.requests(query, left.min(PAGE), cursor.as_deref()).await?;
        requests.extend(page.data);
        cursor = page.next;
        if cursor.is_none() || requests.len() >= limit as usize {
            return Ok(requests);
        }
    }
}

async fn export(client: &Client, query: &RequestQuery, limit: Option<u32>) -> Result<()> {
    let mut response = client.requests_jsonl(query, limit).await?;
    while let Some(chunk) = response.chunk().await.context("the export broke off")? {
        out::bytes(&chunk)?;
    }
    Ok(())
}

fn row(request: &ModelRequest) -> [String; 9] {
    let ModelRequest { result, timing, usage, .. } = request;
    let tokens = usage.as_ref().map_or_else(
        || "-".to_owned(),
        |usage| {
            let about = if usage.estimated { "~" } else { "" };
            format!("{about}{}+{}", usage.prompt_tokens, usage.completion_tokens)
        },
    );
    let code = result.error.as_deref().or(result.finish_reason.as_deref());
    [
        time_of_day(request.at_ms),
        request.id.clone(),
        from(request),
        model(request),
        code.map_or_else(|| result.status.to_string(), |code| format!("{} {code}", result.status)),
        tokens,
        timing.first_token_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms")),
        format!("{} ms", timing.total_ms),
        cost(request),
    ]
}

/// Returns the agent and its session, or the route and the tenant.
fn from(request: &ModelRequest) -> String {
    match &request.agent {
        Some(agent) => format!("{}/{}", agent.name, agent.session),
        None => format!("{} ({})", request.tenant, request.surface),
    }
}

/// Returns the model that was asked for, and the one that answered if it is another one.
fn model(request: &ModelRequest) -> String {
    let (asked, answered) = (&request.model.asked, &request.model.answered);
    if asked == answered { asked.clone() } else { format!("{asked} > {answered}") }
}

fn cost(request: &ModelRequest) -> String {
    request.cost.as_ref().map_or_else(
        || "unknown".to_owned(),
        |cost| {
            let rounded = cost.amount.parse::<Amount>().map(|amount| amount.rounded(DECIMALS));
            format!("{} {}", rounded.unwrap_or_else(|_| cost.amount.clone()), cost.currency)
        },
    )
}

/// Returns a record with its prompt and answer, for people.
fn shown(request: &ModelRequest) -> String {
    let paint = style::stdout();
    let [time, _, from, model, result, tokens, first, total, cost] = row(request);
    let mut lines = vec![format!("{}  {}", paint.bold(&request.id), request.tenant)];
    let mut line = |name: &str, value: &str| lines.push(format!("  {name:<8} {}", for_terminal(value)));
    line("time", &time);
    line("from", &format!("{from}, {}", request.surface));
    if let Some(key) = &request.key {
        line("key", key);
    }
    if let Some(agent) = &request.agent {
        line("turn", &agent.turn);
    }
    line("model", &model);
    line("result", &result);
    let cached = request.usage.as_ref().map_or(0, |usage| usage.cached_tokens);
    line("tokens", &format!("{tokens} ({cached} cached)"));
    let queue = request.timing.queue_ms.map_or_else(String::new, |ms| format!("queue {ms} ms, "));
    line("times", &format!("{queue}first {first}, total {total}"));
    line("cost", &cost);
    for attempt in &request.attempts {
        let status = attempt.status.map_or_else(String::new, |status| format!(" (status {status})"));
        line("attempt", &format!("{}: {}{status}, {} ms", attempt.model, attempt.outcome, attempt.ms));
    }
    match (&request.body, request.has_body) {
        (Some(body), _) => lines.extend(texts(body)),
        (None, true) => lines.push(paint.dim(
            "  the texts are stored; reading them needs a key that was created with `skep key create --bodies`",
        )),
        (None, false) => lines.push(paint.dim("  the texts are not stored")),
    }
    lines.join("\n")
}

fn texts(body: &RequestTexts) -> Vec<String> {
    let paint = style::stdout();
    let mut lines = Vec::new();
    if body.omitted_messages > 0 {
        lines.push(paint.dim(&format!("(without {})", out::count(body.omitted_messages, "older message"))));
    }
    let mut say = |message: &RequestMessage, is_cut: bool| {
        lines.push(String::new());
        lines.push(paint.bold(&message.role));
        lines.extend(message.reasoning.iter().map(|text| paint.dim(&for_terminal(text))));
        if !message.text.is_empty() {
            lines.push(for_terminal(&message.text).to_string());
        }
        for call in &message.calls {
            lines.push(format!(
                "{} {}",
                paint.cyan(&for_terminal(&call.name)),
                for_terminal(&call.arguments)
            ));
        }
        if is_cut {
            lines.push(paint.dim("(cut)"));
        }
    };
    for (index, message) in body.messages.iter().enumerate() {
        say(message, index == 0 && body.request_truncated);
    }
    say(&body.answer, body.answer_truncated);
    if let Some(error) = &body.error {
        lines.extend([String::new(), paint.red(&for_terminal(error))]);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request() -> ModelRequest {
        serde_json::from_value(json!({
            "object": "model_request", "id": "req_1", "at_ms": 1_700_000_000_123_u64, "tenant": "acme", "key": "key-1",
            "agent": {"name": "desk", "session": "ada", "turn": "t-1"}, "surface": "agent",
            "model": {"asked": "smart", "answered": "near/m"},
            "result": {"status": "ok", "error": null, "finish_reason": "stop", "streamed": null},
            "timing": {"queue_ms": null, "first_token_ms": 40, "total_ms": 90},
            "usage": {"prompt_tokens": 12, "cached_tokens": 3, "completion_tokens": 5, "estimated": false},
            "cost": {"amount": "0.00012345", "currency": "USD"},
            "attempts": [
                {"upstream": "gone", "model": "gone/m", "outcome": "unavailable", "status": 503, "ms": 4},
                {"upstream": "near", "model": "near/m", "outcome": "ok", "status": 200, "ms": 80}],
            "has_body": true,
            "body": {"messages": [{"role": "user", "text": "hi\u{1b}[2J"}], "omitted_messages": 1,
                "request_truncated": true, "answer": {"role": "assistant", "text": "hello"},
                "answer_truncated": false, "error": null},
        }))
        .expect("a record")
    }

    #[test]
    fn a_row_names_who_asked_what_and_what_it_cost() {
        let mut request = request();
        assert_eq!(
            row(&request),
            [
                "22:13:20.123",
                "req_1",
                "desk/ada",
                "smart > near/m",
                "ok stop",
                "12+5",
                "40 ms",
                "90 ms",
                "0.000123 USD"
            ]
        );
        (request.agent, request.cost) = (None, None);
        request.result.error = Some("busy".into());
        if let Some(usage) = &mut request.usage {
            usage.estimated = true;
        }
        let row = row(&request);
        assert_eq!((&*row[2], &*row[4], &*row[5], &*row[8]), ("acme (agent)", "ok busy", "~12+5", "unknown"));
    }

    #[test]
    fn a_record_shows_its_attempts_and_texts_without_control_characters() {
        let mut request = request();
        let text = shown(&request);
        for expected in
            ["gone/m: unavailable (status 503), 4 ms", "(without 1 older message)", "(cut)", "hello"]
        {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(!text.contains('\u{1b}'), "{text:?}");
        request.body = None;
        assert!(shown(&request).contains("skep key create --bodies"));
    }
}
