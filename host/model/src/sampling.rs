//! From logits to tokens: penalties, masks, truncation, and a draw that depends on nothing but `(seed, step)`.
//!
//! Invariant: the same row, settings, seed and step give the same token whatever else is in the batch; non-finite
//! logits never become tokens; a row that allows nothing is an error. It knows no tokenizer and no requests.

use crate::error::ModelError;

/// How to choose a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// 1 is off.
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
    /// Says which setting is out of range.
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
            return Err(format!("repetition_penalty must be above 0 and at most 100, but it is {found}"));
        }
        match self.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            Some((token, bias)) => Err(format!("logit_bias of token {token} must be finite, but it is {bias}")),
            None => Ok(()),
        }
    }
}

/// What to do with one row of logits.
#[derive(Clone, Debug)]
pub enum LogitRow<'a> {
    Sample(SampleRow<'a>),
    Score(ScoreRow),
}

/// Draws a token.
#[derive(Clone, Debug)]
pub struct SampleRow<'a> {
    /// Index into the logit rows of the last step.
    pub row: usize,
    pub sampling: &'a Sampling,
    pub seed: u64,
    /// Counts the draws of a sequence.
    pub step: u64,
    /// Bit `t % 32` of word `t / 32` says that token `t` is allowed.
    pub mask: Option<&'a [u32]>,
    pub banned: &'a [u32],
    pub prompt: &'a [u32],
    pub output: &'a [u32],
    /// `Some(n)`: also give the log-probability and the `n` likeliest tokens.
    pub top_logprobs: Option<u32>,
}

/// Scores a given token.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRow {
    pub row: usize,
    pub target: u32,
    pub top: u32,
}

/// What came of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutput {
    pub token: u32,
    /// Log-softmax of the raw logits.
    pub logprob: Option<f32>,
    pub top: Vec<(u32, f32)>,
}
