//! `skep bench engine --against llama-bench`: llama.cpp beside Skep on the same files, in turns.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use skep_model::ExecutorOptions;

use super::super::median;
use super::ceilings::Ceilings;
use super::report::{Decode, shares};
use super::steps::{Amounts, Times, measure};
use super::subject::{Loaded, Subject};
use crate::catalog;
use crate::commands::out;
use crate::guest_build::bounded_command;
use crate::progress::{Progress as _, Terminal};

const LIMIT: Duration = Duration::from_secs(1800);

/// The program, with the flags that it is to be measured with.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Peer {
    program: String,
    flags: Vec<String>,
}

/// Tokens per second of prefill and decode.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Rates {
    prefill: f64,
    decode: f64,
}

/// Results of both programs on the same files.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    prompt: usize,
    generate: usize,
    threads: usize,
    rounds: u16,
    peer: String,
    models: Vec<Compared>,
}

#[derive(Debug, Serialize)]
struct Compared {
    model: String,
    peer: Rates,
    skep: Rates,
    /// Bandwidth of the memory, measured in the same run.
    read_gb_per_s: f64,
    /// Bytes that a step of Skep's decode reads: the weights, only those of the chosen experts of a mixture, and the cache.
    read_bytes_per_step: f64,
    /// Share of that bandwidth at which Skep decodes.
    read_share: f64,
}

/// One test of `llama-bench -o json`.
#[derive(Debug, Deserialize)]
struct Test {
    n_prompt: u64,
    n_gen: u64,
    avg_ts: f64,
}

impl Peer {
    /// Returns the peer if the command line starts with a program of this name.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(str::to_owned);
        let program = words.next()?;
        let is_peer = Path::new(&program).file_name().is_some_and(|name| name == "llama-bench");
        is_peer.then(|| Peer { program, flags: words.collect() })
    }

    /// Measures both on each of the models, in turns; the medians of all rounds count.
    pub(super) fn compare(
        self,
        models: &[String],
        amounts: Amounts,
        options: ExecutorOptions,
        threads: usize,
    ) -> Result<Comparison> {
        let mut compared = Vec::with_capacity(models.len());
        for model in models {
            let path = catalog::resolve(model, &Terminal)?.path;
            let mut loaded = Subject::File(model.clone()).load(amounts.over(&options))?;
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            let step = Terminal.count(&format!("measuring {}", loaded.name), u64::from(amounts.repeat));
            for round in 0..amounts.repeat {
                theirs.push(self.run(&path, amounts, threads)?);
                let times = measure(&mut loaded, Amounts { repeat: 1, ..amounts })?;
                let rate = |tokens: usize, seconds: Option<f64>| tokens as f64 / seconds.unwrap_or(f64::NAN);
                ours.push(Rates {
                    prefill: rate(amounts.prompt, times.prefill_s),
                    decode: rate(amounts.generate, times.decode_s),
                });
                step.advance_to(u64::from(round) + 1);
            }
            step.finish("");
            compared.push(Compared::of(model.clone(), &loaded, amounts, &options, [&theirs[..], &ours[..]])?);
        }
        let peer = std::iter::once(self.program).chain(self.flags).collect::<Vec<_>>().join(" ");
        let Amounts { prompt, generate, repeat: rounds, .. } = amounts;
        Ok(Comparison { prompt, generate, threads, rounds, peer, models: compared })
    }

    fn run(&self, model: &Path, amounts: Amounts, threads: usize) -> Result<Rates> {
        let mut command = Command::new(&self.program);
        command.args(&self.flags).arg("-m").arg(model).args(["-r", "1", "-o", "json"]).stdin(Stdio::null());
        for (flag, value) in [("-p", amounts.prompt), ("-n", amounts.generate), ("-t", threads)] {
            command.args([flag, &value.to_string()]);
        }
        let program = &self.program;
        let finished =
            bounded_command::run(command, LIMIT).with_context(|| format!("--against {program}"))?;
        if !finished.status.success() {
            bail!("{program} failed on {}: {}", model.display(), finished.last_words());
        }
        Rates::read(&finished.stdout).with_context(|| format!("the output of {program} cannot be read"))
    }
}

impl Compared {
    /// Compares the medians of all rounds, of the peer and of Skep.
    fn of(
        model: String,
        loaded: &Loaded,
        amounts: Amounts,
        options: &ExecutorOptions,
        [theirs, ours]: [&[Rates]; 2],
    ) -> Result<Self> {
        let (peer, skep) = (Rates::median(theirs), Rates::median(ours));
        let step = loaded.executor.limits().max_batch_tokens;
        let ceilings = Ceilings::of(loaded, options, amounts.prompt.clamp(1, step))?;
        let times = Times { prefill_s: None, decode_s: Some(amounts.generate as f64 / skep.decode) };
        let (_, decode) = shares(loaded, amounts, times, &ceilings);
        let Decode { read_bytes_per_step, read_share, .. } = decode.context("nothing was decoded")?;
        let read_gb_per_s = ceilings.read_gb_per_s;
        Ok(Compared { model, peer, skep, read_gb_per_s, read_bytes_per_step, read_share })
    }
}

impl Rates {
    fn read(text: &str) -> Result<Self> {
        let tests: Vec<Test> = serde_json::from_str(text)?;
        let rate = |what: &str, is_wanted: fn(&Test) -> bool| {
            let test = tests.iter().find(|test| is_wanted(test) && test.avg_ts > 0.0);
            test.map(|test| test.avg_ts).with_context(|| format!("it has no test of {what}"))
        };
        Ok(Rates {
            prefill: rate("prompts", |test| test.n_prompt > 0 && test.n_gen == 0)?,
            decode: rate("decoding", |test| test.n_gen > 0 && test.n_prompt == 0)?,
        })
    }

    fn median(rounds: &[Rates]) -> Self {
        let of = |value: fn(&Rates) -> f64| median(&mut rounds.iter().map(value).collect::<Vec<_>>());
        Rates { prefill: of(|rates| rates.prefill), decode: of(|rates| rates.decode) }
    }
}

impl Comparison {
    /// Prints the comparison as a table.
    pub(super) fn for_people(&self) -> Result<()> {
        let Comparison { prompt, generate, threads, rounds, peer, models } = self;
        out::line(&format!(
            "prefill of {prompt} and decode of {generate} tokens in tok/s, {threads} threads, median of {rounds} rounds in \
             turns with `{peer}`"
        ))?;
        let row = |compared: &Compared| {
            let Compared { model, peer, skep, read_gb_per_s, read_share, .. } = compared;
            let rates = |rates: &Rates| format!("{:.0} / {:.0}", rates.prefill, rates.decode);
            let ratio = format!("{:.2} / {:.2}", skep.prefill / peer.prefill, skep.decode / peer.decode);
            let reads = format!("{:.0} % of {read_gb_per_s:.1} GB/s", read_share * 100.0);
            [model.clone(), rates(peer), rates(skep), ratio, reads]
        };
        let rows: Vec<_> = models.iter().map(row).collect();
        out::table(["MODEL", "LLAMA.CPP", "SKEP", "RATIO", "DECODE READS"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_llama_bench_is_run_on_the_models_themselves() {
        let peer = Peer::parse("/opt/bin/llama-bench -fa 1").expect("it is");
        assert_eq!(
            (peer.program.as_str(), peer.flags),
            ("/opt/bin/llama-bench", vec!["-fa".into(), "1".into()])
        );
        assert_eq!(Peer::parse("python3 llama-bench.py"), None);
        assert_eq!(Peer::parse(""), None);
    }

    #[test]
    fn rates_are_those_of_the_tests_of_prompts_and_of_decoding() {
        let text = r#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 400.5, "model_type": "llama"},
                       {"n_prompt": 0, "n_gen": 64, "avg_ts": 80.25}]"#;
        let rates = Rates::read(text).expect("both tests");
        assert_eq!((rates.prefill, rates.decode), (400.5, 80.25));
        for (text, expected) in [
            ("warming up", "expected value"),
            (r#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 1.0}]"#, "no test of decoding"),
            (r#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 0.0}]"#, "no test of prompts"),
        ] {
            let error = Rates::read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_comparison_says_how_fast_a_decode_reads_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let (program, script) = (folder.path().join("llama-bench"), folder.path().join("script"));
        let tests =
            r#"[{"n_prompt": 9, "n_gen": 0, "avg_ts": 2.0}, {"n_prompt": 0, "n_gen": 3, "avg_ts": 4.0}]"#;
        std::fs::write(&script, format!("echo '{tests}'\n")).expect("written");
        std::os::unix::fs::symlink("/bin/sh", &program).expect("linked");
        let peer = Peer::parse(&format!("{} {}", program.display(), script.display())).expect("its name");
        let model = format!("{}/../../tests/fixtures/tiny/qwen3-moe", env!("CARGO_MANIFEST_DIR"));
        let amounts = Amounts { prompt: 9, generate: 3, depth: 0, shared: 0, batch: 1, repeat: 1 };
        let options = ExecutorOptions { threads: Some(1), ..ExecutorOptions::default() };
        let comparison = peer.compare(&[model], amounts, options, 1).expect("compared");
        let compared = &comparison.models[0];
        assert_eq!((compared.peer.prefill, compared.peer.decode), (2.0, 4.0));
        let read_gb_per_s = compared.read_bytes_per_step * compared.skep.decode / 1e9;
        let share = compared.read_share * compared.read_gb_per_s;
        assert!(read_gb_per_s > 0.0 && (share / read_gb_per_s - 1.0).abs() < 1e-9, "{compared:?}");
        comparison.for_people().expect("printed");
    }
}
