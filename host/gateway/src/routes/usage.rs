//! `/v1/usage`: what the use of models costs, as JSON or as a table in CSV.

use crate::{ApiError, Gateway, caller::Caller};
use axum::{
    Json,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use skep_api::{EstimatedUsage, UnknownCost, UsageCost, UsageGrouping, marker};
use skep_runtime::{Bill, UsageBy, UsageCounts, UsageDay, UsageLine, UsageQuery, UsageReport};
use std::borrow::Cow;
use utoipa::IntoParams;

/// Days of a report that names no first day.
const DEFAULT_DAYS: u32 = 31;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReportQuery {
    /// The groups: `agent` (the default), `model`, `tenant`, `day`, `key` or `session`.
    by: Option<String>,
    /// The first day in UTC, such as `2026-01-31`, or `7d` for the last seven days; the default is `31d`.
    since: Option<String>,
    /// The last day, which is included; the default is today.
    until: Option<String>,
    /// `json` (the default) or `csv`.
    format: Option<String>,
    /// Reports on this tenant only. Only an admin may name another tenant than its own.
    tenant: Option<String>,
}

/// Reports on the use of models: requests, tokens, what they cost, and what the prefix cache saved.
///
/// An admin sees all tenants, and others see their own. Usage is kept for 400 days. Sessions are listed one by one for
/// 31 days, unless the operator has set another time; afterwards they are part of their agent's usage.
#[utoipa::path(get, path = "/v1/usage", tag = "usage", operation_id = "report_usage", params(ReportQuery), responses(
    (status = 200, description = "The report. In CSV, a group has a row for each currency, and one for usage whose cost is \
                                  `unknown`.",
        content((skep_api::UsageReport = "application/json"), (String = "text/csv"))),
))]
pub(crate) async fn report(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<ReportQuery>,
) -> Result<Response, ApiError> {
    let tenant = match &query.tenant {
        None if caller.is_admin() => None,
        named => Some(caller.tenant(named.as_deref())?.to_string()),
    };
    let today = gateway.host.today();
    let grouping = UsageGrouping::from(query.by.as_deref().unwrap_or("agent"));
    let day = |parameter: &'static str, text: Option<&str>, otherwise: UsageDay| match text {
        Some(text) => {
            UsageDay::parse_since(text, today).map_err(|error| ApiError::parameter(parameter, error))
        }
        None => Ok(otherwise),
    };
    let asked = UsageQuery {
        tenant,
        by: by(&grouping)?,
        since: day("since", query.since.as_deref(), today.earlier(DEFAULT_DAYS - 1))?,
        until: day("until", query.until.as_deref(), today)?,
    };
    if asked.since > asked.until {
        let message = format!("the report would begin on {}, after its end on {}", asked.since, asked.until);
        return Err(ApiError::parameter("since", message));
    }
    let is_csv = match query.format.as_deref() {
        None | Some("json") => false,
        Some("csv") => true,
        Some(_) => return Err(ApiError::parameter("format", "a format is json or csv")),
    };
    let report = gateway.host.usage(&asked).await?;
    if is_csv {
        let table = table(&grouping, &report, &caller);
        let kind = [(header::CONTENT_TYPE, "text/csv; charset=utf-8")];
        return Ok((StatusCode::OK, kind, table).into_response());
    }
    Ok(Json(skep_api::UsageReport {
        object: marker::UsageReport,
        by: grouping,
        since: asked.since.to_string(),
        until: asked.until.to_string(),
        data: report.lines.iter().map(|line| described(line, asked.by, &caller)).collect(),
        total: described(&report.total, asked.by, &caller),
    })
    .into_response())
}

fn by(grouping: &UsageGrouping) -> Result<UsageBy, ApiError> {
    Ok(match grouping {
        UsageGrouping::Agent => UsageBy::Agent,
        UsageGrouping::Model => UsageBy::Model,
        UsageGrouping::Tenant => UsageBy::Tenant,
        UsageGrouping::Day => UsageBy::Day,
        UsageGrouping::Key => UsageBy::Key,
        UsageGrouping::Session => UsageBy::Session,
        UsageGrouping::Other(_) => {
            let message = "usage is grouped by agent, model, tenant, day, key or session";
            return Err(ApiError::parameter("by", message));
        }
    })
}

/// Returns the name of a group as the caller knows it.
fn name_of<'a>(line: &'a UsageLine, by: UsageBy, caller: &Caller) -> Option<Cow<'a, str>> {
    let name = line.name.as_deref()?;
    Some(match by {
        UsageBy::Session => Cow::Owned(caller.name_of(name)),
        _ => Cow::Borrowed(name),
    })
}

fn described(line: &UsageLine, by: UsageBy, caller: &Caller) -> skep_api::UsageLine {
    let UsageCounts { requests, input_tokens, cached_tokens, cache_write_tokens, output_tokens, .. } =
        line.counts;
    let unknown = &line.unpriced;
    skep_api::UsageLine {
        name: name_of(line, by, caller).map(Cow::into_owned),
        agent: line.agent.clone(),
        requests,
        input_tokens,
        cached_input_tokens: cached_tokens,
        cache_write_input_tokens: cache_write_tokens,
        output_tokens,
        estimated: EstimatedUsage {
            requests: line.counts.estimated_requests,
            input_tokens: line.counts.estimated_input_tokens,
            output_tokens: line.counts.estimated_output_tokens,
        },
        cost: line
            .bills
            .iter()
            .map(|(currency, bill)| UsageCost {
                currency: currency.to_string(),
                amount: bill.cost.to_string(),
                saved_by_cache: bill.saved.to_string(),
            })
            .collect(),
        unknown_cost: (!unknown.models.is_empty()).then(|| UnknownCost {
            models: unknown.models.iter().cloned().collect(),
            requests: unknown.counts.requests,
            input_tokens: unknown.counts.input_tokens,
            cached_input_tokens: unknown.counts.cached_tokens,
            cache_write_input_tokens: unknown.counts.cache_write_tokens,
            output_tokens: unknown.counts.output_tokens,
        }),
    }
}

/// Returns the report in CSV, as RFC 4180 describes it.
fn table(grouping: &UsageGrouping, report: &UsageReport, caller: &Caller) -> String {
    let by = by(grouping).unwrap_or(UsageBy::Agent);
    let mut names = vec![grouping.as_str()];
    if by == UsageBy::Session {
        names.insert(0, "agent");
    }
    let columns = [
        "requests",
        "input_tokens",
        "cached_input_tokens",
        "cache_write_input_tokens",
        "output_tokens",
        "estimated_requests",
        "estimated_input_tokens",
        "estimated_output_tokens",
        "currency",
        "cost",
        "saved_by_cache",
    ];
    let mut table = String::new();
    row(&mut table, names.into_iter().chain(columns).map(Cow::Borrowed));
    for line in &report.lines {
        let mut names = vec![name_of(line, by, caller).unwrap_or_default()];
        if by == UsageBy::Session {
            names.insert(0, Cow::Borrowed(line.agent.as_deref().unwrap_or_default()));
        }
        let bills = line.bills.iter().map(|(currency, Bill { cost, saved, counts })| {
            (counts, [currency.to_string(), cost.to_string(), saved.to_string()])
        });
        let unknown = (!line.unpriced.models.is_empty())
            .then(|| (&line.unpriced.counts, [String::new(), "unknown".to_owned(), "unknown".to_owned()]));
        for (counts, money) in bills.chain(unknown) {
            let counts = [
                counts.requests,
                counts.input_tokens,
                counts.cached_tokens,
                counts.cache_write_tokens,
                counts.output_tokens,
                counts.estimated_requests,
                counts.estimated_input_tokens,
                counts.estimated_output_tokens,
            ];
            let numbers = counts.iter().map(u64::to_string).chain(money).map(Cow::Owned);
            row(&mut table, names.iter().cloned().chain(numbers));
        }
    }
    table
}

fn row<'a>(table: &mut String, cells: impl Iterator<Item = Cow<'a, str>>) {
    for (index, cell) in cells.enumerate() {
        if index > 0 {
            table.push(',');
        }
        match cell.contains([',', '"', '\r', '\n']) {
            true => {
                table.push('"');
                table.push_str(&cell.replace('"', "\"\""));
                table.push('"');
            }
            false => table.push_str(&cell),
        }
    }
    table.push_str("\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_with_separators_and_quotes_are_quoted() {
        let mut table = String::new();
        row(&mut table, ["a", "b,c", "say \"hi\"", "two\nlines", ""].into_iter().map(Cow::Borrowed));
        assert_eq!(table, "a,\"b,c\",\"say \"\"hi\"\"\",\"two\nlines\",\r\n");
    }
}
