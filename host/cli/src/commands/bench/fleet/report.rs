//! The figures of a fleet for people and for scripts.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::costs::Costs;
use super::policy::Policy;
use super::simulation::{Figures, Plan};
use crate::commands::out;

/// Reports of a host in a second.
const REPORTS_PER_S: f64 = 2.0;

/// The fleet, and the figures of each policy.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) hosts: u32,
    /// Absent with a trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sessions: Option<u32>,
    pub(super) turns: u64,
    pub(super) seed: u64,
    /// Hosts that died.
    pub(super) deaths: u32,
    pub(super) costs: Costs,
    pub(super) policies: Vec<PolicyReport>,
}

/// The figures of one policy.
#[derive(Debug, Serialize)]
pub(super) struct PolicyReport {
    policy: Policy,
    /// Share of the prompts' tokens that were cached.
    hit_rate: f64,
    first_token_ms: Percentiles,
    /// Mean of the turns of the host with the most of them, divided by the mean of all hosts, before hosts died.
    load_imbalance: Option<f64>,
    /// Sessions whose last turn was at a host that died.
    sessions_of_dead_hosts: u64,
    /// Sessions that changed their host because it had died, until the end.
    moved_from_dead_hosts: u64,
    /// Times that a session changed its host though that was alive.
    moved_from_living_hosts: u64,
    /// Turns that were open at hosts that died.
    interrupted_turns: u64,
    /// Time from the deaths until the turns were as evenly spread as before. `null` if they were not.
    balanced_after_s: Option<f64>,
    /// The load and the warm agents of one host, as it reports them. Zero with policies that need no reports.
    report_bytes: u64,
    /// The reports of all hosts in the memory of each.
    view_bytes: u64,
    /// Megabytes of reports that all hosts together read from the database in a second, because each reads those of all.
    reports_read_mb_per_s: f64,
    wall_s: f64,
}

#[derive(Debug, Serialize)]
struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

impl PolicyReport {
    pub(super) fn new(plan: &Plan<'_>, figures: &Figures, wall: Duration) -> Self {
        let percentile = |share: f64| figures.first_token.percentile_ms(share);
        let hosts = f64::from(plan.hosts);
        PolicyReport {
            policy: plan.policy,
            hit_rate: figures.cached_tokens as f64 / figures.prompt_tokens.max(1) as f64,
            first_token_ms: Percentiles { p50: percentile(0.5), p90: percentile(0.9), p99: percentile(0.99) },
            load_imbalance: figures.balance.mean(),
            sessions_of_dead_hosts: figures.of_dead_hosts,
            moved_from_dead_hosts: figures.moved_from_dead,
            moved_from_living_hosts: figures.moved_from_living,
            interrupted_turns: figures.interrupted,
            balanced_after_s: figures.balance.balanced_after_s(),
            report_bytes: figures.reports.report,
            view_bytes: figures.reports.view,
            reports_read_mb_per_s: hosts * hosts * figures.reports.report as f64 * REPORTS_PER_S / 1e6,
            wall_s: wall.as_secs_f64(),
        }
    }

    fn row(&self) -> [String; 9] {
        let ms = |ms: f64| format!("{ms:.0} ms");
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            self.policy.name().to_owned(),
            percent(self.hit_rate),
            ms(self.first_token_ms.p50),
            ms(self.first_token_ms.p90),
            ms(self.first_token_ms.p99),
            or_none(self.load_imbalance.map(|imbalance| format!("{imbalance:.2}"))),
            format!("{} + {}", self.moved_from_dead_hosts, self.moved_from_living_hosts),
            or_none(self.balanced_after_s.map(|seconds| format!("{seconds:.1} s"))),
            format!("{:.1} s", self.wall_s),
        ]
    }
}

impl Report {
    /// Prints the policies side by side.
    pub(super) fn print(&self) -> Result<()> {
        let sessions = self.sessions.map(|sessions| format!(", {sessions} sessions")).unwrap_or_default();
        out::line(&format!(
            "{} hosts{sessions}, {} turns, seed {}; {} died after 60 % of the turns",
            self.hosts,
            self.turns,
            self.seed,
            out::count(u64::from(self.deaths), "host")
        ))?;
        let rows: Vec<[String; 9]> = self.policies.iter().map(PolicyReport::row).collect();
        let header = ["POLICY", "HIT RATE", "P50", "P90", "P99", "IMBALANCE", "MOVED", "BALANCED", "WALL"];
        out::table(header, &rows)?;
        out::line(
            "P50 to P99: first token. IMBALANCE: turns of the fullest host / mean. MOVED: sessions that left dead + living \
             hosts. BALANCED: after the deaths.",
        )?;
        if let (Some(in_turn), Some(affinity)) = (self.of(Policy::RoundRobin), self.of(Policy::Affinity)) {
            let placement = self.of(Policy::Placement).map(|placement| percent(placement.hit_rate));
            out::line(&format!(
                "affinity takes the hit rate from {} to {}{}",
                percent(in_turn.hit_rate),
                percent(affinity.hit_rate),
                placement.map(|placement| format!(", placement to {placement}")).unwrap_or_default()
            ))?;
        }
        if let Some(PolicyReport { report_bytes, view_bytes, reports_read_mb_per_s, .. }) =
            self.of(Policy::Placement)
        {
            out::line(&format!(
                "placement: a report has {report_bytes} bytes; those of all hosts take {:.1} MB in the memory of each, and all \
                 hosts read {reports_read_mb_per_s:.1} MB/s of them",
                *view_bytes as f64 / 1e6
            ))?;
        }
        Ok(())
    }

    fn of(&self, policy: Policy) -> Option<&PolicyReport> {
        self.policies.iter().find(|report| report.policy == policy)
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
