//! The results, as a table for people and with every answer for scripts.

use std::collections::HashMap;

use anyhow::Result;
use serde::Serialize;

use super::super::median;
use super::answer::ModelAnswer;
use super::cases::{Case, Group, Right, Spelling};
use super::comparison::{Change, compare};
use super::ours::Pair;
use crate::commands::out;

/// Number of additional right answers that a peer may have in total before `--check` fails.
const PEER_SLACK: usize = 3;

/// Results of all cases.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The model, and how its tokens are drawn.
    pub model: String,
    pub peer: Option<String>,
    pub groups: Vec<Tally>,
    pub total: Tally,
    /// Cases that are right free and wrong constrained.
    pub lost: Vec<String>,
    /// Cases that are wrong free and right constrained.
    pub won: Vec<String>,
    /// Number of constrained answers by their relation to the free ones.
    pub changes: Changes,
    pub free: Cost,
    pub constrained: Cost,
    pub peer_cost: Option<Cost>,
    pub prompt_tokens: usize,
    pub cases: Vec<Row>,
}

/// Numbers of right answers.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Tally {
    pub name: &'static str,
    pub cases: usize,
    pub free: usize,
    pub constrained: usize,
    pub peer: Option<usize>,
}

/// Number of constrained answers by their relation to the free ones, as [`Change`] names them.
#[derive(Debug, Default, Serialize)]
pub struct Changes {
    pub free_is_invalid: usize,
    pub none: usize,
    pub tokens: usize,
    pub key_order: usize,
    pub escape: usize,
    pub white_space: usize,
    pub markup: usize,
    pub text: usize,
}

/// Time and tokens of the answers in a column.
#[derive(Debug, Serialize)]
pub struct Cost {
    pub median_ms: f64,
    pub tokens: u64,
    pub ms_per_token: f64,
}

/// The answers to one case.
#[derive(Debug, Serialize)]
pub struct Row {
    pub id: String,
    pub group: Group,
    pub spelling: Spelling,
    pub user: String,
    pub right: Right,
    pub change: Change,
    pub free: Judged,
    pub constrained: Judged,
    pub peer: Option<Judged>,
}

/// An answer, and whether it is right.
#[derive(Debug, Serialize)]
pub struct Judged {
    pub is_right: bool,
    /// The text with the markup of calls, if it is known.
    pub raw: Option<String>,
    #[serde(flatten)]
    pub answer: ModelAnswer,
}

impl Report {
    /// Judges the answers, and counts the right ones of each group.
    pub fn new(
        model: String,
        peer: Option<String>,
        cases: &[Case],
        pairs: Vec<Pair>,
        peers: Vec<ModelAnswer>,
    ) -> Self {
        let prompt_tokens = pairs.iter().map(|pair| pair.free.prompt_tokens).sum();
        let mut peers = peers.into_iter();
        let rows: Vec<Row> =
            cases.iter().zip(pairs).map(|(case, pair)| Row::new(case, pair, peers.next())).collect();
        let names = |is_one: fn(&Row) -> bool| rows.iter().filter(|row| is_one(row)).map(Row::name).collect();
        let cost = |answer: fn(&Row) -> Option<&Judged>| Cost::new(rows.iter().filter_map(answer));
        Self {
            model,
            groups: Group::ALL
                .into_iter()
                .map(|group| Tally::new(group.name(), rows.iter().filter(|row| row.group == group)))
                .filter(|tally| tally.cases > 0)
                .collect(),
            total: Tally::new("total", rows.iter()),
            lost: names(|row| row.free.is_right && !row.constrained.is_right),
            won: names(|row| !row.free.is_right && row.constrained.is_right),
            changes: Changes::new(&rows),
            free: cost(|row| Some(&row.free)),
            constrained: cost(|row| Some(&row.constrained)),
            peer_cost: peer.is_some().then(|| cost(|row| row.peer.as_ref())),
            peer,
            prompt_tokens,
            cases: rows,
        }
    }

    /// Returns the failures of a check.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if !self.lost.is_empty() {
            failures.push(format!("{} right free answers are wrong when constrained", self.lost.len()));
        }
        if self.changes.text > 0 {
            let changed = self.changes.text;
            failures
                .push(format!("{changed} free answers in the accepted set were changed by the constraint"));
        }
        let ours = self.total.constrained;
        if let Some(theirs) = self.total.peer.filter(|&theirs| ours + PEER_SLACK < theirs) {
            failures.push(format!("{ours} constrained answers are right, but {theirs} of the peer"));
        }
        failures
    }

    /// Prints the results as tables.
    pub fn for_people(&self) -> Result<()> {
        out::line(&format!("{}: right answers", self.model))?;
        let tallies = self.groups.iter().chain([&self.total]);
        if self.peer.is_some() {
            let rows: Vec<[String; 5]> = tallies.map(|tally| tally.cells_with_peer()).collect();
            out::table(["GROUP", "CASES", "FREE", "CONSTRAINED", "PEER"], &rows)?;
        } else {
            let rows: Vec<[String; 4]> = tallies.map(Tally::cells).collect();
            out::table(["GROUP", "CASES", "FREE", "CONSTRAINED"], &rows)?;
        }
        out::line("")?;
        let costs = [
            ("free", Some(&self.free)),
            ("constrained", Some(&self.constrained)),
            ("peer", self.peer_cost.as_ref()),
        ];
        let rows: Vec<[String; 4]> =
            costs.into_iter().filter_map(|(name, cost)| Some(cost?.cells(name))).collect();
        out::table(["ANSWERS", "MEDIAN MS", "TOKENS", "MS PER TOKEN"], &rows)?;
        out::line(&format!(
            "times are with the prompts in the cache, which have {} tokens on average",
            self.prompt_tokens / self.total.cases.max(1)
        ))?;
        if let Some(peer) = &self.peer {
            out::line(&format!(
                "{peer} renders messages and tools itself: with another template, its prompts have other tokens"
            ))?;
        }
        out::line("")?;
        self.changes.for_people(self.total.cases)?;
        self.list("right free, wrong constrained", &self.lost)?;
        self.list("accepted free answers that changed", &self.changed())
    }

    fn changed(&self) -> Vec<String> {
        self.cases.iter().filter(|row| row.change == Change::Text).map(Row::name).collect()
    }

    fn list(&self, title: &str, names: &[String]) -> Result<()> {
        if names.is_empty() {
            return out::line(&format!("{title}: none"));
        }
        out::line(&format!("{title}: {}", names.len()))?;
        names.iter().try_for_each(|name| out::line(&format!("  {name}")))
    }
}

impl Tally {
    fn new<'a>(name: &'static str, rows: impl Iterator<Item = &'a Row>) -> Self {
        let mut tally = Tally { name, ..Tally::default() };
        for row in rows {
            tally.cases += 1;
            tally.free += usize::from(row.free.is_right);
            tally.constrained += usize::from(row.constrained.is_right);
            if let Some(peer) = &row.peer {
                *tally.peer.get_or_insert(0) += usize::from(peer.is_right);
            }
        }
        tally
    }

    fn cells(&self) -> [String; 4] {
        let Self { name, cases, free, constrained, .. } = self;
        [(*name).to_owned(), cases.to_string(), free.to_string(), constrained.to_string()]
    }

    fn cells_with_peer(&self) -> [String; 5] {
        let [name, cases, free, constrained] = self.cells();
        [name, cases, free, constrained, self.peer.map_or("-".to_owned(), |peer| peer.to_string())]
    }
}

impl Changes {
    fn new(rows: &[Row]) -> Self {
        let mut counts: HashMap<Change, usize> = HashMap::new();
        for row in rows {
            *counts.entry(row.change).or_default() += 1;
        }
        let count = |change: Change| counts.get(&change).copied().unwrap_or(0);
        Self {
            free_is_invalid: count(Change::FreeIsInvalid),
            none: count(Change::None),
            tokens: count(Change::Tokens),
            key_order: count(Change::KeyOrder),
            escape: count(Change::Escape),
            white_space: count(Change::WhiteSpace),
            markup: count(Change::Markup),
            text: count(Change::Text),
        }
    }

    fn for_people(&self, cases: usize) -> Result<()> {
        let Self { free_is_invalid, none, tokens, key_order, escape, white_space, markup, text } = self;
        let valid = cases - free_is_invalid;
        let outside = key_order + escape + white_space + markup;
        out::line(&format!(
            "{valid} of {cases} free answers are valid; for these, the constrained answer is"
        ))?;
        out::line(&format!(
            "  the same, token by token, in {none} cases, and the same text in other tokens in {tokens}"
        ))?;
        out::line(&format!(
            "  another one in {outside} cases: the free one is outside the accepted set by its key order ({key_order}), \
             escapes ({escape}), white space ({white_space}) or markup ({markup})"
        ))?;
        out::line(&format!("  another one without such a reason in {text} cases"))
    }
}

impl Cost {
    fn new<'a>(answers: impl Iterator<Item = &'a Judged>) -> Self {
        let (mut times, mut tokens) = (Vec::new(), 0);
        for judged in answers {
            times.push(judged.answer.ms);
            tokens += judged.answer.tokens;
        }
        let sum: f64 = times.iter().sum();
        Self { median_ms: median(&mut times), tokens, ms_per_token: sum / tokens.max(1) as f64 }
    }

    fn cells(&self, name: &str) -> [String; 4] {
        let Self { median_ms, tokens, ms_per_token } = self;
        [name.to_owned(), format!("{median_ms:.0}"), tokens.to_string(), format!("{ms_per_token:.2}")]
    }
}

impl Row {
    fn new(case: &Case, pair: Pair, peer: Option<ModelAnswer>) -> Self {
        let change = compare(case, &pair);
        let judged = |answer: ModelAnswer, raw: Option<String>| Judged {
            is_right: case.is_answered_by(&answer),
            raw,
            answer,
        };
        Self {
            id: case.id.clone(),
            group: case.group,
            spelling: case.spelling,
            user: case.user.clone(),
            right: case.right.clone(),
            change,
            free: judged(pair.free.answer, Some(pair.free.raw)),
            constrained: judged(pair.constrained.answer, Some(pair.constrained.raw)),
            peer: peer.map(|answer| judged(answer, None)),
        }
    }

    fn name(&self) -> String {
        format!("{} ({})", self.id, self.spelling.name())
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::WrittenCall;
    use super::super::cases::{AskedSpelling, of_group};
    use super::super::ours::Produced;
    use super::*;

    fn answer(case: &Case, is_right: bool) -> ModelAnswer {
        let (mut text, mut calls) = ("I cannot.".to_owned(), Vec::new());
        match &case.right {
            Right::Json(value) if is_right => text = value.to_string(),
            Right::Calls(right) if is_right => {
                text = String::new();
                let written = |call: &super::super::cases::Call| WrittenCall {
                    name: call.name.clone(),
                    arguments: call.arguments.to_string(),
                };
                calls = right.iter().map(written).collect();
            }
            _ => {}
        }
        ModelAnswer { text, calls, ended: true, ms: 2.0, tokens: 4 }
    }

    fn produced(case: &Case, is_right: bool) -> Produced {
        let answer = answer(case, is_right);
        Produced { raw: answer.text.clone(), pieces: Vec::new(), prompt_tokens: 10, answer }
    }

    #[test]
    fn right_answers_are_counted_and_lost_ones_are_named() {
        let cases = of_group(Group::Extraction, 6, AskedSpelling::Own).expect("the cases can be read");
        let is_right = [(true, true, true), (true, false, true), (false, true, true), (false, false, true)];
        let is_right = is_right.into_iter().chain([(false, false, true), (false, false, true)]);
        let (mut pairs, mut peers) = (Vec::new(), Vec::new());
        for (case, (free, constrained, peer)) in cases.iter().zip(is_right) {
            pairs.push(Pair { free: produced(case, free), constrained: produced(case, constrained) });
            peers.push(answer(case, peer));
        }
        let report = Report::new("m".into(), Some("p".into()), &cases, pairs, peers);
        let Tally { cases: count, free, constrained, peer, .. } = report.total;
        assert_eq!((count, free, constrained, peer), (6, 2, 2, Some(6)));
        assert_eq!((report.lost.len(), report.won.len(), report.groups.len()), (1, 1, 1));
        assert!(report.lost[0].starts_with("extraction/"), "{:?}", report.lost);
        assert_eq!((report.changes.none, report.changes.text, report.changes.free_is_invalid), (1, 1, 4));
        assert_eq!((report.free.tokens, report.free.ms_per_token, report.prompt_tokens), (24, 0.5, 60));
        let failures = report.failures().join("; ");
        for expected in [
            "1 right free answers",
            "1 free answers in the accepted set",
            "2 constrained answers are right, but 6",
        ] {
            assert!(failures.contains(expected), "{failures}");
        }
    }
}
