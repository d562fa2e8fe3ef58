//! Traces of turns as JSON lines: `{"at_ms": 0, "agent": "desk", "session": "s1", "prompt_tokens": 1200, "output_tokens": 80}`, in the
//! order of their times.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{BufRead as _, BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::workload::{Turn, Workload};

/// Maximum length of a line.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// A turn in a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Line {
    at_ms: u64,
    agent: String,
    session: String,
    prompt_tokens: u32,
    output_tokens: u32,
}

/// Reads a trace line by line. Sessions and agents are numbered in the order in which they occur, and known by their hashes.
pub(super) struct TraceReader {
    path: PathBuf,
    file: BufReader<File>,
    line: u64,
    at_ms: u64,
    sessions: HashMap<u64, u32>,
    agents: HashMap<u64, u32>,
}

impl TraceReader {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open the trace {}", path.display()))?;
        Ok(TraceReader {
            path: path.to_owned(),
            file: BufReader::new(file),
            line: 0,
            at_ms: 0,
            sessions: HashMap::new(),
            agents: HashMap::new(),
        })
    }

    /// Returns the next turn, if there is one.
    pub(super) fn next(&mut self) -> Result<Option<Turn>> {
        self.read().with_context(|| format!("line {} of the trace {}", self.line, self.path.display()))
    }

    fn read(&mut self) -> Result<Option<Turn>> {
        self.line += 1;
        let mut text = String::new();
        if (&mut self.file).take(MAX_LINE_BYTES).read_line(&mut text)? == 0 {
            return Ok(None);
        }
        if text.len() as u64 == MAX_LINE_BYTES {
            bail!("it is longer than {MAX_LINE_BYTES} bytes");
        }
        let line: Line = serde_json::from_str(&text).context(
            "it is not a turn\n  hint: {\"at_ms\": 0, \"agent\": \"desk\", \"session\": \"s1\", \"prompt_tokens\": 1200, \
             \"output_tokens\": 80}",
        )?;
        let Line { at_ms, agent, session, prompt_tokens, output_tokens } = line;
        if at_ms < self.at_ms {
            bail!("its at_ms is {at_ms}, and that of the line before {}: sort the trace by time", self.at_ms);
        }
        if prompt_tokens == 0 || output_tokens == 0 {
            bail!("a turn has at least one token in its prompt and in its output");
        }
        self.at_ms = at_ms;
        Ok(Some(Turn {
            at_us: at_ms.saturating_mul(1_000),
            session: number(&mut self.sessions, hash(&(&agent, &session))),
            agent: number(&mut self.agents, hash(&agent)),
            prompt_tokens,
            output_tokens,
            cuts: 0,
        }))
    }
}

/// Writes the turns of a workload to a file. Returns their number.
pub(super) fn write(path: &Path, workload: &mut Workload) -> Result<u64> {
    let create = || format!("cannot write the trace {}", path.display());
    let mut file = BufWriter::new(File::create(path).with_context(create)?);
    let mut turns = 0;
    while let Some(turn) = workload.next()? {
        let line = Line {
            at_ms: turn.at_us / 1_000,
            agent: format!("agent-{}", turn.agent),
            session: format!("session-{}", turn.session),
            prompt_tokens: turn.prompt_tokens,
            output_tokens: turn.output_tokens,
        };
        serde_json::to_writer(&mut file, &line)?;
        file.write_all(b"\n").with_context(create)?;
        turns += 1;
    }
    file.flush().with_context(create)?;
    Ok(turns)
}

fn number(known: &mut HashMap<u64, u32>, hash: u64) -> u32 {
    let next = u32::try_from(known.len()).unwrap_or(u32::MAX);
    *known.entry(hash).or_insert(next)
}

fn hash(of: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::fleet::costs::Costs;
    use crate::commands::bench::fleet::workload::{Drawn, Sizes};

    fn read(text: &str) -> Result<Vec<Turn>> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), text)?;
        let mut reader = TraceReader::open(file.path())?;
        std::iter::from_fn(|| reader.next().transpose()).collect()
    }

    #[test]
    fn a_written_trace_has_the_same_turns() {
        let sizes = Sizes { hosts: 2, sessions: 50, turns: 200, agents: 3, load: 0.5, seed: 1 };
        let drawn = || Workload::Drawn(Box::new(Drawn::new(sizes, &Costs::for_tests())));
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert_eq!(write(file.path(), &mut drawn()).expect("written"), 200);
        let (mut drawn, mut reader) = (drawn(), TraceReader::open(file.path()).expect("there"));
        let (mut sessions, mut agents) = (HashMap::new(), HashMap::new());
        while let Some(turn) = drawn.next().expect("drawn") {
            let same = reader.next().expect("valid").expect("as many");
            let at_us = turn.at_us / 1_000 * 1_000;
            let session = *sessions.entry(turn.session).or_insert(same.session);
            let agent = *agents.entry(turn.agent).or_insert(same.agent);
            assert_eq!(same, Turn { at_us, session, agent, ..turn });
        }
        assert!(reader.next().expect("valid").is_none());
    }

    #[test]
    fn a_wrong_line_is_named() {
        let good = r#"{"at_ms": 5, "agent": "a", "session": "s", "prompt_tokens": 9, "output_tokens": 1}"#;
        assert_eq!(read(&format!("{good}\n{good}")).expect("valid").len(), 2);
        for (wrong, why) in [
            ("hello".to_owned(), "not a turn"),
            (good.replace('5', "4"), "sort the trace"),
            (good.replace("9,", "0,"), "at least one token"),
            (format!("{{\"agent\": \"{}\"}}", "a".repeat(70_000)), "longer than"),
        ] {
            let error = format!("{:#}", read(&format!("{good}\n{wrong}\n")).expect_err(why));
            assert!(error.contains("line 2 of the trace") && error.contains(why), "{error}");
        }
    }
}
