//! The timeline of a round: what the engine did and what clients saw, as a trace file and as shares of the time.
//!
//! The file has the Trace Event Format, which Perfetto and the browsers' tracing pages open.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};
use skep_engine::{Phase, StepRecord};

use super::sessions::Exchange;
use crate::commands::out;

/// Shares of the engine's time in a round.
#[derive(Debug, Serialize)]
pub struct StepShares {
    pub steps: usize,
    /// Mean number of sequences and of tokens in a step.
    pub sequences: f64,
    pub tokens: f64,
    pub wait: f64,
    pub plan: f64,
    pub forward: f64,
    pub masks: f64,
    pub sample: f64,
    pub commit: f64,
}

impl StepShares {
    /// Returns the shares of the steps that ended in the time, or `None` if there were none.
    pub fn of(steps: &[StepRecord], from: Instant, to: Instant) -> Option<Self> {
        let steps: Vec<&StepRecord> =
            steps.iter().filter(|step| (from..=to).contains(&step.ended())).collect();
        let sum = |phase: Phase| steps.iter().map(|step| step.took(phase)).sum::<Duration>().as_secs_f64();
        let all: f64 = Phase::ALL.into_iter().map(sum).sum();
        let mean = |count: fn(&StepRecord) -> usize| {
            steps.iter().map(|step| count(step)).sum::<usize>() as f64 / steps.len() as f64
        };
        (!steps.is_empty()).then(|| StepShares {
            steps: steps.len(),
            sequences: mean(|step| step.work.sequences),
            tokens: mean(|step| step.work.tokens),
            wait: sum(Phase::Wait) / all,
            plan: sum(Phase::Plan) / all,
            forward: sum(Phase::Forward) / all,
            masks: sum(Phase::Masks) / all,
            sample: sum(Phase::Sample) / all,
            commit: sum(Phase::Commit) / all,
        })
    }

    /// Prints the shares as text for people.
    pub fn print(&self) -> Result<()> {
        let Self { steps, sequences, tokens, wait, plan, forward, masks, sample, commit } = self;
        let percent = |share: &f64| format!("{:.1} %", share * 100.0);
        out::line(&format!(
            "  engine        {steps} steps of {sequences:.1} sequences and {tokens:.1} tokens; forward {}, masks {}, \
             sample {}, commit {}, plan {}, wait {}",
            percent(forward),
            percent(masks),
            percent(sample),
            percent(commit),
            percent(plan),
            percent(wait),
        ))
    }
}

/// Writes the steps and the requests as a trace. Times count from `start`.
pub fn write(path: &Path, start: Instant, steps: &[StepRecord], exchanges: &[Exchange]) -> Result<()> {
    let name =
        |pid: u32, name: &str| json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}});
    let mut events = vec![name(1, "engine"), name(2, "requests")];
    steps.iter().for_each(|step| add_step(&mut events, start, step));
    for exchange in exchanges {
        let Exchange { worker, kind, asked, first_token, ended, usage, .. } = exchange;
        let args = json!({"prompt": usage.prompt_tokens, "cached": usage.cached_tokens(), "output": usage.completion_tokens});
        let until_first = *asked + *first_token;
        events.push(event((2, *worker as usize), kind, start, (*asked, *ended - *asked), &args));
        events.push(event(
            (2, *worker as usize),
            "first token",
            start,
            (*asked, until_first - *asked),
            &Value::Null,
        ));
    }
    let write = || -> Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        serde_json::to_writer(&mut file, &json!({"displayTimeUnit": "ms", "traceEvents": events}))?;
        file.flush()?;
        Ok(())
    };
    write().with_context(|| format!("writing the timeline {}", path.display()))
}

/// Adds the phases of a step, one after the other.
fn add_step(events: &mut Vec<Value>, start: Instant, step: &StepRecord) {
    let work = step.work;
    let args = json!({"sequences": work.sequences, "tokens": work.tokens, "logit_rows": work.logit_rows, "drafted": work.drafted,
                      "read_pages": work.read_pages});
    let mut at = step.began;
    for phase in Phase::ALL {
        let took = step.took(phase);
        events.push(event((1, step.replica), phase.as_str(), start, (at, took), &args));
        at += took;
    }
}

fn event(
    (pid, tid): (u32, usize),
    name: &str,
    start: Instant,
    (at, took): (Instant, Duration),
    args: &Value,
) -> Value {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let at = micros(at.saturating_duration_since(start));
    json!({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at, "dur": micros(took), "args": args})
}
