//! `skep bench determinism`: checks that an answer does not depend on what else the host does, bit for bit.

use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use futures::future::try_join_all;
use serde::Serialize;
use skep_engine::{
    DraftLimits, Engine, EngineOptions, GenerateRequest, Sampling, SpecialTokens, Speculation, TokenEvent,
};
use skep_model::{ExecutorOptions, KvDtype, LoadedModel, Tokenizer, physical_cores};

use crate::catalog;
use crate::commands::out;
use crate::progress::Terminal;

/// Size of a KV cache that has pages for only a few of the sequences at a time.
const FEW_KV_TOKENS: usize = 512;
const SMALL_STEP_TOKENS: usize = 24;
/// Subjects of the prompts, each of which is asked about in several ways.
const SUBJECTS: [&str; 8] = [
    "why the sky is blue",
    "how bread rises",
    "the history of the printing press",
    "what a prime number is",
    "how a bicycle stays upright",
    "the water cycle",
    "why leaves change colour in autumn",
    "how a sailing boat moves against the wind",
];
const QUESTIONS: [&str; 4] = [
    "Here is a short explanation of {}:\n\n",
    "Question: can you explain {}? Question: can you explain {} in other words? Answer:",
    "A teacher spoke to the class about {}. She began with a story that everyone knew, went on to what people had believed for \
     a long time, and came at last to what can be measured today. \"When we speak of {},\" she said, \"we should begin with",
    "Notes on {}\n1. Definition\n2. Example\n3. Common mistakes\n\n1. Definition\n",
];

/// Compare answers of different settings, bit by bit
///
/// The same greedy prompts are answered on the CPU with several settings that must not change an answer:
/// threads, requests one at a time, pipeline stages, replicas, drafts, small steps, and so few pages that
/// sequences are preempted. Fails if a token or a log-probability differs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench determinism
  skep bench determinism --prompts 32 --tokens 96 --kv i8")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Number of prompts
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=32))]
    prompts: u16,
    /// Tokens per answer
    #[arg(long, value_name = "TOKENS", default_value_t = 48, value_parser = clap::value_parser!(u16).range(1..=256))]
    tokens: u16,
    /// Format of keys and values: f16, f32 or i8
    #[arg(long, value_name = "FORMAT", default_value_t = KvDtype::F16)]
    kv: KvDtype,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    prompts: usize,
    tokens: u16,
    kv: String,
    /// Setting that the others are compared with.
    reference: String,
    settings: Vec<Compared>,
}

/// Comparison of the answers of a setting with those of the reference.
#[derive(Debug, Serialize)]
struct Compared {
    setting: String,
    same_texts: usize,
    /// Number of answers whose tokens and log-probabilities are bit-identical.
    same_bits: usize,
    /// Largest difference between log-probabilities, up to the first token that differs.
    largest_difference: f32,
    preemptions: u64,
    accepted_drafts: u64,
}

/// One way to run the model.
#[derive(Clone, Default)]
struct Setting {
    name: String,
    executor: ExecutorOptions,
    engine: EngineOptions,
    replicas: usize,
    one_by_one: bool,
}

/// Tokens with their log-probabilities.
type ScoredTokens = Vec<(u32, f32)>;

/// Computes the answers with each setting, and fails if one of them differs.
pub async fn run(args: Args) -> Result<()> {
    let model = tokio::task::block_in_place(|| catalog::resolve(&args.model, &Terminal))?;
    let mut settings = settings(args.kv).into_iter();
    let reference = settings.next().context("no setting to compare with")?;
    let (expected, _) = answers(&model.path, &reference, &args).await?;
    let mut report = Report {
        model: model.name,
        prompts: expected.len(),
        tokens: args.tokens,
        kv: args.kv.to_string(),
        reference: reference.name,
        settings: Vec::new(),
    };
    for setting in settings {
        let (found, stats) = answers(&model.path, &setting, &args).await?;
        report.settings.push(Compared {
            preemptions: stats.preemptions,
            accepted_drafts: stats.accepted_tokens,
            ..Compared::new(setting.name, &expected, &found)
        });
    }
    if args.json {
        out::json(&report)?
    } else {
        report.for_people()?
    }
    match report.settings.iter().find(|setting| setting.same_bits < report.prompts) {
        None => Ok(()),
        Some(differs) => bail!(
            "{} of {} answers differ with {}",
            report.prompts - differs.same_bits,
            report.prompts,
            differs.setting
        ),
    }
}

/// Returns the settings; the first one is the reference.
fn settings(kv: KvDtype) -> Vec<Setting> {
    let threads = physical_cores().max(2);
    let executor = ExecutorOptions { threads: Some(threads), kv, ..ExecutorOptions::default() };
    let base = |name: &str| Setting {
        name: name.to_owned(),
        executor: executor.clone(),
        replicas: 1,
        ..Setting::default()
    };
    let limits = DraftLimits { adaptive: false, ..DraftLimits::default() };
    let drafts = EngineOptions { speculation: Speculation::PromptLookup(limits), ..EngineOptions::default() };
    let small = EngineOptions { step_tokens: Some(SMALL_STEP_TOKENS), ..EngineOptions::default() };
    vec![
        base(&format!("{threads} threads")),
        Setting { executor: ExecutorOptions { threads: Some(1), ..executor.clone() }, ..base("1 thread") },
        Setting { executor: ExecutorOptions { threads: Some(3), ..executor.clone() }, ..base("3 threads") },
        Setting { one_by_one: true, ..base("one request at a time") },
        Setting { engine: drafts, ..base("drafts by prompt lookup") },
        Setting { engine: small, ..base(&format!("steps of {SMALL_STEP_TOKENS} tokens")) },
        Setting {
            executor: ExecutorOptions { kv_tokens: Some(FEW_KV_TOKENS), ..executor.clone() },
            ..base(&format!("pages for {FEW_KV_TOKENS} tokens"))
        },
        Setting {
            executor: ExecutorOptions { pipeline_parallel: 2, ..executor.clone() },
            ..base("2 pipeline stages")
        },
        Setting { replicas: 2, ..base("2 replicas") },
    ]
}

async fn answers(
    path: &Path,
    setting: &Setting,
    args: &Args,
) -> Result<(Vec<ScoredTokens>, skep_engine::EngineStats)> {
    let replicas = NonZeroUsize::new(setting.replicas).unwrap_or(NonZeroUsize::MIN);
    let models = tokio::task::block_in_place(|| {
        LoadedModel::open_replicas("model", path, setting.executor.clone(), replicas)
            .with_context(|| format!("cannot load {}", path.display()))
    })?;
    let requests = requests(&models[0].tokenizer, args)?;
    let engine = Engine::start_replicas(models, setting.engine.clone())?;
    let mut answers = Vec::new();
    if setting.one_by_one {
        for request in requests {
            answers.push(answer(&engine, request).await?);
        }
    } else {
        answers = try_join_all(requests.into_iter().map(|request| answer(&engine, request))).await?;
    }
    Ok((answers, engine.stats()))
}

fn requests(tokenizer: &Tokenizer, args: &Args) -> Result<Vec<GenerateRequest>> {
    let prompts =
        QUESTIONS.iter().flat_map(|question| SUBJECTS.map(|subject| question.replace("{}", subject)));
    let request = |prompt: String| -> Result<GenerateRequest> {
        let mut request = GenerateRequest::new(tokenizer.encode(&prompt, SpecialTokens::Literal)?);
        request.sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        request.max_tokens = Some(args.tokens.into());
        request.ignore_eos = true;
        request.top_logprobs = Some(1);
        Ok(request)
    };
    // Takes some prompts of every kind of question.
    let prompts: Vec<String> = prompts.collect();
    let step = prompts.len() / usize::from(args.prompts).min(prompts.len());
    prompts.into_iter().step_by(step).take(args.prompts.into()).map(request).collect()
}

async fn answer(engine: &Engine, request: GenerateRequest) -> Result<ScoredTokens> {
    let mut stream = engine.generate(request)?;
    let mut answer = Vec::new();
    while let Some(event) = stream.next().await {
        if let TokenEvent::Token(token) = event? {
            let logprob = token.logprob.context("a token has no log-probability")?;
            answer.push((token.id, logprob.logprob));
        }
    }
    Ok(answer)
}

impl Compared {
    fn new(setting: String, expected: &[ScoredTokens], found: &[ScoredTokens]) -> Self {
        let pairs = || expected.iter().zip(found);
        let tokens = |answer: &ScoredTokens| answer.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        let bits =
            |answer: &ScoredTokens| answer.iter().map(|(id, x)| (*id, x.to_bits())).collect::<Vec<_>>();
        let differences = pairs().flat_map(|(a, b)| {
            let shared = a.iter().zip(b).take_while(|((a, _), (b, _))| a == b);
            shared.map(|((_, a), (_, b))| (a - b).abs())
        });
        Compared {
            setting,
            same_texts: pairs().filter(|(a, b)| tokens(a) == tokens(b)).count(),
            same_bits: pairs().filter(|(a, b)| bits(a) == bits(b)).count(),
            largest_difference: differences.fold(0.0, f32::max),
            preemptions: 0,
            accepted_drafts: 0,
        }
    }
}

impl Report {
    fn for_people(&self) -> Result<()> {
        let Report { model, prompts, tokens, kv, reference, .. } = self;
        out::line(&format!("{model}, {kv} keys and values: {prompts} prompts, {tokens} greedy tokens each"))?;
        out::line(&format!(
            "  {:<26} {:>10} {:>10} {:>16}",
            "setting", "same text", "same bits", "max |Δ logprob|"
        ))?;
        out::line(&format!("  {reference:<26} {:>10} {:>10} {:>16}", "-", "-", "-"))?;
        self.settings.iter().try_for_each(|setting| {
            let Compared { setting, same_texts, same_bits, largest_difference, .. } = setting;
            let of = |count: &usize| format!("{count}/{prompts}");
            out::line(&format!(
                "  {setting:<26} {:>10} {:>10} {largest_difference:>16}",
                of(same_texts),
                of(same_bits)
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differing_bits_and_tokens_are_detected() {
        let answer = |second: u32, logprob: f32| vec![(1, -0.5), (second, logprob), (3, -1.0)];
        let expected = [answer(2, -0.25), answer(2, -0.25), answer(2, -0.25)];
        let found = [answer(2, -0.25), answer(2, -0.25f32.next_down()), answer(7, -3.0)];
        let compared = Compared::new("other".to_owned(), &expected, &found);
        assert_eq!((compared.same_texts, compared.same_bits), (2, 1));
        // After the first difference, the texts cannot be compared.
        assert!(compared.largest_difference > 0.0 && compared.largest_difference < 1e-6, "{compared:?}");
    }
}
