//! `skep usage`: what the use of models cost.

use anyhow::Result;
use skep_api::{UsageCost, UsageGrouping, UsageLine, UsageReport};
use skep_runtime::Amount;

use super::{HostArgs, out};
use crate::client::UsageQuery;

/// Decimals of amounts in the table. JSON and CSV have them exactly.
const DECIMALS: usize = 6;

/// Show what models were used for and what it cost, by agent, model, tenant, day, key or session
///
/// Each day costs what its models cost on that day, by the prices in skep.toml. Usage without a price is shown as
/// `unknown` and is in no sum. An admin sees all tenants, and other keys see their own. Days are days in UTC.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep usage
  skep usage --by model --since 7d
  skep usage --by day --since 2026-01-01 --until 2026-01-31 --csv > january.csv
  skep usage --by tenant --json | jq -r '.data[] | [.name, .cost[].amount] | @tsv'")]
pub struct Args {
    /// Key to group the usage by
    #[arg(long, default_value = "agent", value_parser = ["agent", "model", "tenant", "day", "key", "session"])]
    by: String,
    /// First day, such as 2026-01-31, or 7d for the last seven days [default: 31d]
    #[arg(long, value_name = "DAY")]
    since: Option<String>,
    /// Last day, which is included [default: today]
    #[arg(long, value_name = "DAY")]
    until: Option<String>,
    /// Only this tenant
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    #[command(flatten)]
    host: HostArgs,
    /// Print as CSV, with a row for each group and currency
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the report as a table, CSV or JSON.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    let Args { by, since, until, tenant, csv, json, .. } = args;
    let query = UsageQuery { by, since, until, tenant };
    if csv {
        return out::piece(&client.usage_csv(&query).await?);
    }
    let report = client.usage(&query).await?;
    if json {
        return out::json(&report);
    }
    let heading = report.by.as_str().to_uppercase();
    let mut rows: Vec<[String; 6]> = report.data.iter().map(|line| row(line, &report.by)).collect();
    let total = UsageLine { name: Some("total".to_owned()), agent: None, ..report.total.clone() };
    rows.push(row(&total, &report.by));
    out::table([&heading, "REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST"], &rows)?;
    summary(&report).iter().try_for_each(|line| out::line(line))
}

fn row(line: &UsageLine, by: &UsageGrouping) -> [String; 6] {
    let name = match (&line.name, &line.agent) {
        (Some(name), Some(agent)) => format!("{agent}/{name}"),
        (Some(name), None) => name.clone(),
        (None, Some(agent)) => format!("{agent} (older sessions)"),
        (None, None) => match by {
            UsageGrouping::Key => "(no key)".to_owned(),
            _ => "(no agent)".to_owned(),
        },
    };
    let mut costs: Vec<String> = line.cost.iter().map(|cost| money(&cost.amount, cost)).collect();
    if line.unknown_cost.is_some() {
        costs.push("unknown".to_owned());
    }
    if costs.is_empty() {
        costs.push("-".to_owned());
    }
    let counts = [line.requests, line.input_tokens, line.cached_input_tokens, line.output_tokens];
    let [requests, input, cached, output] = counts.map(|count| count.to_string());
    [name, requests, input, cached, output, costs.join(" + ")]
}

/// Returns an amount with its currency, rounded.
fn money(amount: &str, cost: &UsageCost) -> String {
    let rounded = amount.parse::<Amount>().map(|amount| amount.rounded(DECIMALS));
    format!("{} {}", rounded.unwrap_or_else(|_| amount.to_owned()), cost.currency)
}

/// Returns the lines below the table: the days, what the cache saved, and what is estimated or unknown.
fn summary(report: &UsageReport) -> Vec<String> {
    let UsageReport { since, until, total, .. } = report;
    let mut lines = vec![String::new(), format!("from {since} to {until}, in UTC")];
    if total.input_tokens > 0 {
        let share = 100.0 * total.cached_input_tokens as f64 / total.input_tokens as f64;
        let saved: Vec<String> = total.cost.iter().map(|cost| money(&cost.saved_by_cache, cost)).collect();
        let saved = match (saved.is_empty(), &total.unknown_cost) {
            (true, _) => "an unknown amount".to_owned(),
            (false, None) => saved.join(" and "),
            (false, Some(_)) => format!("{}, excluding usage without a price", saved.join(" and ")),
        };
        lines.push(format!("prefix cache: {share:.1} % of the input tokens, which saved {saved}"));
    }
    if total.estimated.requests > 0 {
        lines.push(format!(
            "estimates: {} cut off, with {} input and {} output tokens",
            out::count(total.estimated.requests, "request"),
            total.estimated.input_tokens,
            total.estimated.output_tokens
        ));
    }
    if let Some(unknown) = &total.unknown_cost {
        lines.push(format!(
            "unknown cost: {} input and {} output tokens of {}; set prices under [prices.\"MODEL\"] in skep.toml{}",
            unknown.input_tokens,
            unknown.output_tokens,
            unknown.models.join(", "),
            match unknown.cache_write_input_tokens {
                0 => String::new(),
                written => format!(", with `cache_write` for the {written} that were written to a cache"),
            }
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(total: serde_json::Value) -> UsageReport {
        serde_json::from_value(json!({"object": "usage_report", "by": "agent", "since": "2026-01-01",
            "until": "2026-01-31", "data": [], "total": total}))
        .expect("a report")
    }

    #[test]
    fn the_cache_and_unknown_costs_have_lines_of_their_own() {
        let total = json!({"name": null, "requests": 3, "input_tokens": 1_000, "cached_input_tokens": 250,
            "output_tokens": 9, "estimated": {"requests": 1, "input_tokens": 7, "output_tokens": 2},
            "cost": [{"currency": "USD", "amount": "0.0000016", "saved_by_cache": "0.000125"}],
            "unknown_cost": {"models": ["mystery"], "requests": 1, "input_tokens": 5, "cached_input_tokens": 0,
                "output_tokens": 4}});
        let report = report(total);
        assert_eq!(
            row(&report.total, &report.by),
            ["(no agent)", "3", "1000", "250", "9", "0.000002 USD + unknown"]
        );
        assert_eq!(
            summary(&report)[1..],
            [
                "from 2026-01-01 to 2026-01-31, in UTC",
                "prefix cache: 25.0 % of the input tokens, which saved 0.000125 USD, excluding usage without a price",
                "estimates: 1 request cut off, with 7 input and 2 output tokens",
                "unknown cost: 5 input and 4 output tokens of mystery; set prices under [prices.\"MODEL\"] in skep.toml",
            ]
        );
    }
}
