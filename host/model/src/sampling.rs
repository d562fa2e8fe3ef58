//! Turns logits into tokens: penalties, masks, truncation, and a draw that depends only on `(seed, step)`.
//!
//! Invariant: the same row, settings, seed and step give the same token, whatever else is in the batch.
//! Non-finite logits never become tokens, and a row that allows no token is an error. This module knows nothing
//! of tokenizers or requests.

use std::borrow::Cow;
use std::cmp::Ordering;

use serde::{Deserialize, Serialize};
use skep_kernels::Isa;
use skep_kernels::softmax::log_sum_exp;

use crate::error::ModelError;
use crate::occurrences::Occurrences;
use crate::seen_tokens::SeenTokens;
use crate::token_set::TokenSet;

/// The settings for choosing a token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 selects greedy sampling.
    pub temperature: f32,
    /// 0 disables top-k.
    pub top_k: u32,
    /// 1 disables top-p.
    pub top_p: f32,
    /// 0 disables min-p.
    pub min_p: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// 1 disables the repetition penalty.
    pub repetition_penalty: f32,
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

impl Sampling {
    /// Returns whether a penalty depends on the number of times that the output contains a token.
    pub fn counts_occurrences(&self) -> bool {
        [self.frequency_penalty, self.presence_penalty] != [0.0; 2]
    }

    /// Checks the settings. The error names the first setting that is out of range.
    pub fn validate(&self) -> Result<(), String> {
        let ranges = [
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
        ];
        for (name, value, low, high) in ranges {
            if !(low..=high).contains(&value) {
                return Err(format!("{name} must be between {low} and {high}, but it is {value}"));
            }
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty <= 100.0) {
            let found = self.repetition_penalty;
            return Err(format!(
                "repetition_penalty must be greater than 0 and at most 100, but it is {found}"
            ));
        }
        match self.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            Some((token, bias)) => {
                Err(format!("logit_bias of token {token} must be finite, but it is {bias}"))
            }
            None => Ok(()),
        }
    }
}

/// The operation on one row of logits.
#[derive(Clone, Debug)]
pub enum LogitRow<'a> {
    Sample(SampleRow<'a>),
    Score(ScoreRow),
}

impl LogitRow<'_> {
    /// Returns the index into the logit rows of the last step.
    pub fn row(&self) -> usize {
        match self {
            LogitRow::Sample(sample) => sample.row,
            LogitRow::Score(score) => score.row,
        }
    }
}

/// A request to draw a token.
#[derive(Clone, Debug)]
pub struct SampleRow<'a> {
    /// Index into the logit rows of the last step.
    pub row: usize,
    pub sampling: &'a Sampling,
    pub seed: u64,
    /// Number of the draw within its sequence.
    pub step: u64,
    /// Bit `t % 32` of word `t / 32` says whether token `t` is allowed.
    pub mask: Option<&'a [u32]>,
    pub banned: &'a [u32],
    pub prompt: &'a [u32],
    pub output: &'a [u32],
    /// The distinct tokens at the beginning of the prompt and the output, as many as the sequence has marked. A repetition
    /// penalty marks the others for this row, and all of them if this is `None`.
    pub seen: Option<&'a SeenTokens>,
    /// The counts of the tokens at the beginning of the output, as many as the sequence has counted. Frequency and
    /// presence penalties count the others for this row, and all of them if this is `None`.
    pub occurrences: Option<&'a Occurrences>,
    /// Returns the log-probability and the `n` most likely tokens as well if this is `Some(n)`.
    pub top_logprobs: Option<u32>,
}

impl<'a> SampleRow<'a> {
    /// Creates the first draw of a row without history, restrictions or log-probabilities.
    pub fn plain(row: usize, sampling: &'a Sampling) -> Self {
        SampleRow {
            row,
            sampling,
            seed: 0,
            step: 0,
            mask: None,
            banned: &[],
            prompt: &[],
            output: &[],
            seen: None,
            occurrences: None,
            top_logprobs: None,
        }
    }

    /// Returns whether the row chooses from other logits than those of the step.
    fn adjusts(&self) -> bool {
        let Sampling { repetition_penalty, logit_bias, .. } = self.sampling;
        let penalizes = self.sampling.counts_occurrences() || *repetition_penalty != 1.0;
        penalizes || !logit_bias.is_empty() || self.mask.is_some() || !self.banned.is_empty()
    }

    /// Calls `take` with each distinct token of the output and the number of its occurrences.
    pub(crate) fn each_occurrence(&self, take: impl FnMut(u32, u32)) {
        Occurrences::each(self.occurrences, self.output, take);
    }

    /// Fills a set with the tokens of the prompt and the output that are below `vocabulary`.
    pub(crate) fn fill_seen(&self, vocabulary: usize, set: &mut TokenSet) {
        let marked = match self.seen.filter(|seen| seen.set().vocabulary() == vocabulary) {
            Some(seen) => {
                set.copy_from(seen.set());
                seen.marked()
            }
            None => {
                set.reset(vocabulary);
                0
            }
        };
        for token in self.prompt.iter().chain(self.output).skip(marked) {
            set.insert(*token);
        }
    }
}

/// A request to score a given token.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRow {
    pub row: usize,
    pub target: u32,
    pub top: u32,
}

/// The result of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutput {
    pub token: u32,
    /// Log-softmax of the raw logits at the token.
    pub logprob: Option<f32>,
    pub top: Vec<(u32, f32)>,
}

/// Draws or scores one row. Logits that are not numbers are an error of that row alone.
pub(crate) fn draw(isa: Isa, logits: &[f32], row: &LogitRow<'_>) -> Result<RowOutput, ModelError> {
    let highest = highest(logits).map_err(|token| ModelError::NotNumbers { row: row.row(), token })?;
    match row {
        LogitRow::Score(score) => {
            let (logprob, top) = logprobs(isa, logits, score.target, score.top)?;
            Ok(RowOutput { token: score.target, logprob: Some(logprob), top })
        }
        LogitRow::Sample(sample) => {
            let token = choose(logits, highest, sample)?;
            let (logprob, top) = match sample.top_logprobs {
                Some(count) => {
                    let (logprob, top) = logprobs(isa, logits, token, count)?;
                    (Some(logprob), top)
                }
                None => (None, Vec::new()),
            };
            Ok(RowOutput { token, logprob, top })
        }
    }
}

/// Returns the highest logit, or the first token whose logit is not a number.
fn highest(logits: &[f32]) -> Result<f32, usize> {
    /// Logits that are compared at once, in registers.
    const LANES: usize = 16;
    let mut highest = [f32::NEG_INFINITY; LANES];
    let mut are_numbers = [true; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, logit) in chunk.iter().enumerate() {
            highest[lane] = if *logit > highest[lane] { *logit } else { highest[lane] };
            are_numbers[lane] &= !logit.is_nan();
        }
    }
    if are_numbers.contains(&false) || rest.iter().any(|logit| logit.is_nan()) {
        return Err(logits.iter().position(|logit| logit.is_nan()).unwrap_or(0));
    }
    Ok(highest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max))
}

/// Returns the first token whose logit is `highest`.
fn first_with(logits: &[f32], highest: f32) -> Option<usize> {
    const LANES: usize = 64;
    // Chunks are compared without leaving early, which registers do at once.
    let has = |chunk: &[f32]| chunk.iter().fold(false, |found, logit| found | (*logit == highest));
    let start = logits.chunks(LANES).position(has)? * LANES;
    Some(start + logits[start..].iter().position(|logit| *logit == highest)?)
}

fn choose(logits: &[f32], highest_logit: f32, row: &SampleRow<'_>) -> Result<u32, ModelError> {
    let sampling = row.sampling;
    sampling.validate().map_err(|problem| ModelError::Option { option: "sampling".to_owned(), problem })?;
    let is_adjusted = row.adjusts() || highest_logit == f32::INFINITY;
    let adjusted = if is_adjusted { Cow::Owned(adjust(logits, row)) } else { Cow::Borrowed(logits) };
    let highest = if is_adjusted { highest(&adjusted).ok() } else { Some(highest_logit) };
    let best = highest.filter(|highest| *highest > f32::NEG_INFINITY);
    let Some((highest, token)) = best.and_then(|best| Some((best, first_with(&adjusted, best)?))) else {
        return Err(ModelError::Batch {
            problem: format!("row {}: the mask, bans and logits leave no token to choose from", row.row),
        });
    };
    if sampling.temperature == 0.0 || sampling.top_k == 1 {
        return Ok(token as u32);
    }
    let candidates = weigh(&adjusted, highest, sampling);
    Ok(pick(&candidates, uniform(row.seed, row.step)).unwrap_or(token as u32))
}

/// Returns the logits after penalties, bias, mask and bans. Tokens that must not be chosen have negative
/// infinity.
fn adjust(logits: &[f32], row: &SampleRow<'_>) -> Vec<f32> {
    let sampling = row.sampling;
    let mut adjusted: Vec<f32> = logits.iter().map(|logit| logit.min(f32::MAX)).collect();
    let repetition = sampling.repetition_penalty;
    if repetition != 1.0 {
        let mut seen = TokenSet::default();
        row.fill_seen(adjusted.len(), &mut seen);
        for token in seen.iter() {
            let logit = &mut adjusted[token as usize];
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
    }
    if sampling.counts_occurrences() {
        row.each_occurrence(|token, count| {
            if let Some(logit) = adjusted.get_mut(token as usize) {
                *logit -= count as f32 * sampling.frequency_penalty + sampling.presence_penalty;
            }
        });
    }
    for (token, bias) in &sampling.logit_bias {
        if let Some(logit) = adjusted.get_mut(*token as usize) {
            *logit = (*logit + bias).min(f32::MAX);
        }
    }
    if let Some(mask) = row.mask {
        for (word, logits) in adjusted.chunks_mut(32).enumerate() {
            let allowed = mask.get(word).copied().unwrap_or(0);
            for (bit, logit) in logits.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
    for token in row.banned {
        if let Some(logit) = adjusted.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    adjusted
}

/// Returns the tokens that remain after top-k, top-p and min-p, with their weights relative to the most likely
/// token.
fn weigh(logits: &[f32], highest: f32, sampling: &Sampling) -> Vec<(u32, f32)> {
    let weight = |logit: f32| ((logit - highest) / sampling.temperature).exp();
    let mut candidates: Vec<(u32, f32)> = logits
        .iter()
        .enumerate()
        .map(|(token, logit)| (token as u32, weight(*logit)))
        .filter(|(_, weight)| *weight > 0.0)
        .collect();
    let top_k = sampling.top_k as usize;
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, likelier);
        candidates.truncate(top_k);
    }
    if sampling.top_p < 1.0 {
        keep_top_p(&mut candidates, sampling.top_p);
    }
    candidates.retain(|(_, weight)| *weight >= sampling.min_p);
    // The fixed order makes a draw independent of how the selection reordered the tokens.
    candidates.sort_unstable_by_key(|(token, _)| *token);
    candidates
}

/// Keeps the shortest list of most likely tokens whose weights reach the fraction `top_p`, but at least one
/// token.
fn keep_top_p(candidates: &mut Vec<(u32, f32)>, top_p: f32) {
    let goal = f64::from(top_p) * candidates.iter().map(|(_, weight)| f64::from(*weight)).sum::<f64>();
    // Few tokens carry most of the weight, so this sorts a growing head instead of the whole list.
    let mut head = 64.min(candidates.len());
    loop {
        if head < candidates.len() {
            candidates.select_nth_unstable_by(head - 1, likelier);
        }
        candidates[..head].sort_unstable_by(likelier);
        let mut sum = 0.0;
        let reached = candidates[..head].iter().position(|(_, weight)| {
            sum += f64::from(*weight);
            sum >= goal
        });
        if let Some(last) = reached {
            return candidates.truncate(last + 1);
        }
        if head >= candidates.len() {
            return;
        }
        head = (head * 8).min(candidates.len());
    }
}

/// Orders by descending weight, then by ascending id.
fn likelier(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn pick(candidates: &[(u32, f32)], uniform: f64) -> Option<u32> {
    let total: f64 = candidates.iter().map(|(_, weight)| f64::from(*weight)).sum();
    let mut left = uniform * total;
    for (token, weight) in candidates {
        left -= f64::from(*weight);
        if left < 0.0 {
            return Some(*token);
        }
    }
    candidates.last().map(|(token, _)| *token)
}

/// Returns a uniform number in 0..1 from a counter: two rounds of SplitMix64's finalizer over the seed and the
/// step.
fn uniform(seed: u64, step: u64) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (mix(mix(seed) ^ step) >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns the log-probability of `target` and the `count` most likely tokens, both from the raw logits.
fn logprobs(isa: Isa, logits: &[f32], target: u32, count: u32) -> Result<(f32, Vec<(u32, f32)>), ModelError> {
    let Some(logit) = logits.get(target as usize) else {
        let size = logits.len();
        return Err(ModelError::Batch {
            problem: format!("cannot score token {target}; the vocabulary has {size} tokens"),
        });
    };
    let total = log_sum_exp(isa, logits);
    if !total.is_finite() || !logit.is_finite() {
        return Err(ModelError::Batch { problem: "cannot score logits that are not finite".to_owned() });
    }
    let count = (count as usize).min(logits.len());
    let mut top = Vec::new();
    if count > 0 {
        top = logits.iter().enumerate().map(|(token, logit)| (token as u32, *logit)).collect();
        top.select_nth_unstable_by(count - 1, likelier);
        top.truncate(count);
        top.sort_unstable_by(likelier);
        top.iter_mut().for_each(|(_, logit)| *logit -= total);
    }
    Ok((logit - total, top))
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
