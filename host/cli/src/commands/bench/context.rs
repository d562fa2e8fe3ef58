//! `skep bench context`: one long prompt, in the steps in which a host computes it, and what its cached prefix saves.
//!
//! The KV cache has room for one such sequence, so that what waits for its pages can be measured, too.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use skep_engine::{Engine, EngineOptions, GenerateRequest, MemoryPlan, Sampling, TokenEvent, TokenStream};
use skep_model::{ExecutorOptions, LoadedModel, PAGE_TOKENS};

use crate::catalog;
use crate::commands::out;
use crate::compute_flags::ComputeFlags;
use crate::device_flag::{kernel_folders, report_fallback};
use crate::progress::{Progress as _, Terminal};

/// Time within which every request has to end.
const DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// Measure one long prompt: its memory, its steps, and what its cached prefix saves
///
/// The prompt is computed as a host computes it, in steps. Then the conversation continues: the same prompt and a
/// few tokens more. While it continues, another prompt of the same length arrives, which has to wait because the KV
/// cache holds only one of them. A prompt that is longer than the cache is refused.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model synthesize --like tiny-deepseek --context 262144 long.gguf
  skep bench context --model long.gguf
  skep bench context --model long.gguf --tokens 262000 --continued 100 --kv i8 --json")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH")]
    model: String,
    /// Tokens of the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    tokens: u32,
    /// Tokens by which the conversation continues
    #[arg(long, value_name = "TOKENS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    continued: u32,
    /// Tokens per answer
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    generate: u32,
    /// Tokens per step of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Threads [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    compute: ComputeFlags,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    kv: String,
    /// Tokens that the KV cache holds.
    kv_tokens: usize,
    kv_bytes_per_token: f64,
    memory: MemoryPlan,
    /// The whole prompt is computed.
    first: Turn,
    /// The prompt of the first turn and a few tokens more.
    continued: Turn,
    /// Time until another prompt of the same length is admitted beside the conversation, which continues again.
    admitted_beside_s: f64,
    /// Time until the conversation has ended meanwhile.
    ended_meanwhile_s: f64,
    /// Answer to a prompt that is longer than the cache.
    refusal: String,
}

/// A turn and its measurements.
#[derive(Debug, Clone, Copy, Serialize)]
struct Turn {
    prompt_tokens: u32,
    cached_tokens: u32,
    /// Time until the sequence is admitted.
    admitted_s: f64,
    first_token_s: f64,
    /// Rate at which the rest of the prompt was computed.
    tok_per_s: f64,
    /// Number of steps, those that decode included.
    steps: u64,
}

/// Runs the command.
pub async fn run(args: Args) -> Result<()> {
    let report = measure(&args).await?;
    if args.json { out::json(&report) } else { report.for_people() }
}

async fn measure(args: &Args) -> Result<Report> {
    let engine = tokio::task::block_in_place(|| args.start())?;
    let (tokens, continued) = (args.tokens as usize, args.continued as usize);
    let all = tokens + continued + args.generate as usize;
    ensure!(
        all <= engine.sequence_limit(),
        "a sequence of {all} tokens is longer than the {} of {}\n  hint: measure fewer --tokens, or a model with a longer \
         context, such as one of `skep model synthesize --like tiny-deepseek --context 262144`",
        engine.sequence_limit(),
        engine.info().name
    );
    let step = Terminal.begin(&format!("computing {tokens} tokens"), None);
    let first = turn(&engine, args.request(&engine, 0, tokens)).await?;
    step.finish("");
    let conversation = || args.request(&engine, 0, tokens + continued);
    let continued = turn(&engine, conversation()).await?;

    let mut running = engine.generate(conversation())?;
    until(&mut running, |event| matches!(event, TokenEvent::Started { .. })).await?;
    let arrived = Instant::now();
    let mut other = engine.generate(args.request(&engine, 1, tokens))?;
    let (ended, admitted) = tokio::join!(
        async {
            until(&mut running, |event| matches!(event, TokenEvent::Finished(_))).await?;
            Ok::<_, anyhow::Error>(arrived.elapsed())
        },
        async {
            until(&mut other, |event| matches!(event, TokenEvent::Started { .. })).await?;
            Ok::<_, anyhow::Error>(arrived.elapsed())
        },
    );
    // The other prompt is not computed to its end.
    drop(other);
    let refusal = match engine.generate(args.request(&engine, 2, engine.sequence_limit() + 1)) {
        Ok(_) => bail!("a prompt that is longer than the cache was accepted"),
        Err(error) => error.to_string(),
    };
    let (info, stats) = (engine.info(), engine.stats());
    let kv_tokens = stats.pages_total * PAGE_TOKENS;
    Ok(Report {
        model: info.name.clone(),
        device: info.device.clone(),
        kv: args.compute.kv.unwrap_or(ExecutorOptions::default().kv).to_string(),
        kv_tokens,
        kv_bytes_per_token: info.memory.kv_bytes as f64 / kv_tokens as f64,
        memory: info.memory,
        first,
        continued,
        admitted_beside_s: admitted?.as_secs_f64(),
        ended_meanwhile_s: ended?.as_secs_f64(),
        refusal,
    })
}

impl Args {
    /// Starts an engine whose KV cache holds one sequence.
    fn start(&self) -> Result<Engine> {
        let model = catalog::resolve(&self.model, &Terminal)?;
        let all = self.tokens as usize + self.continued as usize + self.generate as usize;
        let mut options = ExecutorOptions {
            kernels: kernel_folders()?,
            threads: self.threads,
            // The last page may be filled in part, and the token after the last one is drawn.
            kv_tokens: Some(all.next_multiple_of(PAGE_TOKENS) + PAGE_TOKENS),
            max_batch_tokens: self.chunk as usize,
            max_sequences: 2,
            max_logit_rows: 2,
            ..ExecutorOptions::default()
        };
        self.compute.apply(&mut options);
        let loaded = LoadedModel::open(&model.name, &model.path, options)
            .with_context(|| format!("cannot load {}", model.path.display()))?;
        report_fallback(&model.name, loaded.fallback.as_deref());
        let options =
            EngineOptions { max_sequences: 2, default_deadline: DEADLINE, ..EngineOptions::default() };
        Ok(Engine::start(loaded, options)?)
    }

    /// Returns a request of a conversation, whose prompt begins like its shorter ones and unlike those of others.
    fn request(&self, engine: &Engine, conversation: u64, tokens: usize) -> GenerateRequest {
        let vocabulary = engine.info().vocabulary_size as u64;
        let token = |position: u64| {
            let mixed = (position + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(conversation * 7919);
            ((mixed >> 20) % vocabulary) as u32
        };
        let mut request = GenerateRequest::new((0..tokens as u64).map(token).collect());
        request.sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        request.max_tokens = Some(self.generate as usize);
        request.ignore_eos = true;
        request.affinity.session = Some(conversation.to_string());
        request
    }
}

async fn turn(engine: &Engine, request: GenerateRequest) -> Result<Turn> {
    let (before, begun) = (engine.stats().steps, Instant::now());
    let mut stream = engine.generate(request)?;
    until(&mut stream, |event| matches!(event, TokenEvent::Started { .. })).await?;
    let admitted_s = begun.elapsed().as_secs_f64();
    until(&mut stream, |event| matches!(event, TokenEvent::Token(_))).await?;
    let first_token_s = begun.elapsed().as_secs_f64();
    let ended = until(&mut stream, |event| matches!(event, TokenEvent::Finished(_))).await?;
    let TokenEvent::Finished(finished) = ended else { bail!("the answer ended without a result") };
    let (prompt_tokens, cached_tokens) = (finished.usage.prompt_tokens, finished.usage.cached_tokens);
    let computed = f64::from(prompt_tokens.saturating_sub(cached_tokens));
    let steps = engine.stats().steps - before;
    let tok_per_s = computed / (first_token_s - admitted_s).max(f64::MIN_POSITIVE);
    Ok(Turn { prompt_tokens, cached_tokens, admitted_s, first_token_s, tok_per_s, steps })
}

/// Returns the next event that is wanted.
async fn until(stream: &mut TokenStream, is_wanted: impl Fn(&TokenEvent) -> bool) -> Result<TokenEvent> {
    while let Some(event) = stream.next().await {
        let event = event?;
        if is_wanted(&event) {
            return Ok(event);
        }
    }
    bail!("a sequence ended early")
}

impl Report {
    fn for_people(&self) -> Result<()> {
        let Report { model, device, kv, kv_tokens, kv_bytes_per_token, memory, .. } = self;
        out::line(&format!("{model}: {device}, {kv} keys and values"))?;
        out::line(&format!(
            "  memory     {memory}; {kv_tokens} tokens of {kv_bytes_per_token:.0} bytes in the cache"
        ))?;
        for (name, turn) in [("first", self.first), ("continued", self.continued)] {
            let Turn { prompt_tokens, cached_tokens, admitted_s, first_token_s, tok_per_s, steps } = turn;
            out::line(&format!(
                "  {name:<10} {prompt_tokens} tokens, {cached_tokens} cached: admitted after {:.1} ms, first token after \
                 {first_token_s:.2} s, {tok_per_s:.0} tok/s in {steps} steps",
                admitted_s * 1e3
            ))?;
        }
        out::line(&format!(
            "  beside it  another prompt is admitted after {:.2} s; the conversation ended after {:.2} s",
            self.admitted_beside_s, self.ended_meanwhile_s
        ))?;
        out::line(&format!("  too long   {}", self.refusal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use std::path::Path;

    #[derive(Debug, clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        args: Args,
    }

    fn args(model: &Path, flags: &str) -> Args {
        let words = ["context", "--model", model.to_str().expect("a path"), "--device", "cpu"];
        let flags = flags.split_whitespace();
        Wrapper::try_parse_from(words.into_iter().chain(flags)).expect("good flags").args
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_prompt_is_computed_once_and_another_one_waits_for_its_pages() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let folder = tempfile::tempdir().expect("a folder");
        for (from, to) in [
            ("tiny/deepseek-v3/config.json", "config.json"),
            ("tiny/deepseek-v3/model.safetensors", "model.safetensors"),
            ("tokenizer/byte-level-chatml.json", "tokenizer.json"),
        ] {
            std::fs::copy(fixtures.join(from), folder.path().join(to)).expect("copied");
        }
        let flags = "--tokens 300 --continued 40 --generate 4 --chunk 32 --threads 2";
        let report = measure(&args(folder.path(), flags)).await.expect("measured");
        let (first, continued) = (report.first, report.continued);
        assert_eq!((first.prompt_tokens, first.cached_tokens), (300, 0));
        assert_eq!(continued.prompt_tokens, 340);
        assert!(continued.cached_tokens >= 300 - PAGE_TOKENS as u32, "{continued:?}");
        assert!(first.steps >= 300 / 32 && continued.steps < first.steps, "{first:?} {continued:?}");
        assert!(report.kv_tokens >= 344 && report.kv_tokens < 2 * 340, "{report:?}");
        assert!(report.refusal.contains("do not fit the context"), "{}", report.refusal);
        report.for_people().expect("printed");
        let error = measure(&args(folder.path(), "--tokens 600")).await.expect_err("too long");
        assert!(error.to_string().contains("hint: measure fewer --tokens"), "{error}");
    }
}
