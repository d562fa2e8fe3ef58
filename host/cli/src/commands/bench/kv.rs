//! `skep bench kv`: what KV pages on disk gain when the sessions do not fit into memory, and what a bad disk costs.
//!
//! Each case runs the same sessions one after the other on a fresh engine and an empty folder: a first turn of each, which
//! fills memory four times over, and then a second one, which is measured.

use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use skep_engine::{
    Affinity, DiskTier, Engine, EngineOptions, GenerateRequest, Sampling, SpecialTokens, TierOptions,
    TierShares, TokenEvent,
};
use skep_model::{ExecutorOptions, KvDtype, LoadedModel, PAGE_TOKENS, Tokenizer};

use super::percentile;
use crate::catalog;
use crate::commands::out;
use crate::progress::Terminal;

/// The working set, as a multiple of the pages in memory.
const WORKING_SETS: usize = 4;
/// Rate of the slow disk, in bytes per second.
const SLOW_DISK: u64 = 4 << 20;
/// Rate of the disk that computing keeps up with, as a multiple of the rate of computing.
const NARROW_DISK: f64 = 1.5;
/// Time within which the pages of a first turn have to be on disk.
const WRITTEN_WITHIN: Duration = Duration::from_secs(300);
const SECOND_QUESTION: &str = " And what about a parcel of 12 kg? Explain the next rule as well.";

/// Measure KV pages on disk with sessions that do not fit into memory
///
/// The sessions take turns, and all of them together have four times the tokens that the KV cache holds. A first
/// turn of each fills memory and disk; the second one is measured: where its prompt's pages came from, and how long
/// the first token took. The cases are no disk, a disk, a disk whose pages are read ahead of each turn, one that gives pages
/// 1.5 times as fast as they are computed, a full disk, a slow one, and damaged files. Answers must be those without a disk.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench kv
  skep bench kv --kv-tokens 8192 --sessions 32 --folder /mnt/nvme
  skep bench kv --json | jq '.cases[] | {case, first_token_p50_ms}'")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Tokens that the KV cache in memory holds
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(512..=1_048_576))]
    kv_tokens: u32,
    /// Number of sessions, which share the working set
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(8..=1024))]
    sessions: u32,
    /// Tokens per answer
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    answer_tokens: u32,
    /// Format of keys and values: f16, f32 or i8
    #[arg(long, value_name = "FORMAT", default_value_t = KvDtype::F16)]
    kv: KvDtype,
    /// Threads of the engine [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Folder on the disk to measure [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// One state of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    NoDisk,
    Disk,
    ReadAhead,
    NarrowDisk,
    FullDisk,
    SlowDisk,
    DamagedFiles,
}

const CASES: [Case; 7] = [
    Case::NoDisk,
    Case::Disk,
    Case::ReadAhead,
    Case::NarrowDisk,
    Case::FullDisk,
    Case::SlowDisk,
    Case::DamagedFiles,
];

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    kv: String,
    kv_tokens: u32,
    sessions: u32,
    cases: Vec<CaseReport>,
}

/// The second turns of all sessions.
#[derive(Debug, Default, Serialize)]
struct CaseReport {
    case: &'static str,
    prompt_tokens: u64,
    tiers: Tiers,
    first_token_p50_ms: f64,
    first_token_p90_ms: f64,
    damaged_pages: u64,
    /// Pages that were not written.
    dropped_pages: u64,
    /// Answers that are those without a disk.
    same_answers: usize,
    /// Bytes of a page on disk.
    #[serde(skip)]
    page_bytes: u64,
}

/// Tokens of prompts by where their keys and values came from.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
struct Tiers {
    memory: u64,
    disk: u64,
    computed: u64,
}

/// A turn and its measurements.
struct Turn {
    ids: Vec<u32>,
    first_token: Duration,
    prompt: u64,
    cached: u64,
}

/// Runs the command.
pub async fn run(args: Args) -> Result<()> {
    let model = tokio::task::block_in_place(|| catalog::resolve(&args.model, &Terminal))?;
    let mut report = Report {
        model: model.name,
        kv: args.kv.to_string(),
        kv_tokens: args.kv_tokens,
        sessions: args.sessions,
        cases: Vec::new(),
    };
    let mut expected: Option<Vec<Vec<u32>>> = None;
    for case in CASES {
        let read_rate = case.read_rate(&report.cases, args.sessions);
        let (mut measured, answers) = measure((case, read_rate), &model.path, &args).await?;
        let expected = expected.get_or_insert_with(|| answers.clone());
        measured.same_answers = answers.iter().zip(expected.iter()).filter(|(a, b)| a == b).count();
        report.cases.push(measured);
    }
    match args.json {
        true => out::json(&report)?,
        false => report.for_people()?,
    }
    let all = args.sessions as usize;
    match report.cases.iter().find(|case| case.same_answers < all) {
        None => Ok(()),
        Some(CaseReport { case, same_answers, .. }) => {
            bail!("{} of {all} answers differ from those without a disk: {case}", all - same_answers)
        }
    }
}

/// Runs both turns of all sessions with a disk of this rate, and returns what the second ones measured and answered.
async fn measure(
    (case, read_rate): (Case, Option<u64>),
    path: &Path,
    args: &Args,
) -> Result<(CaseReport, Vec<Vec<u32>>)> {
    let folder = match &args.folder {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    };
    let folder = folder.context("cannot create a temporary folder")?;
    let tier = case.tier(folder.path(), read_rate)?;
    let executor = ExecutorOptions {
        threads: args.threads,
        kv: args.kv,
        kv_tokens: Some(args.kv_tokens as usize),
        ..ExecutorOptions::default()
    };
    let models = tokio::task::block_in_place(|| {
        LoadedModel::open_replicas("model", path, executor, NonZeroUsize::MIN)
            .with_context(|| format!("cannot load {}", path.display()))
    })?;
    let tokenizer = models[0].tokenizer.clone();
    let engine =
        Engine::start_replicas(models, EngineOptions { disk: tier.clone(), ..EngineOptions::default() })?;
    let prompt_tokens = WORKING_SETS * args.kv_tokens as usize / args.sessions as usize;
    let second = tokenizer.encode(SECOND_QUESTION, SpecialTokens::Literal)?;
    let all = prompt_tokens + second.len() + 2 * args.answer_tokens as usize;
    ensure!(
        all <= engine.sequence_limit(),
        "a session has {all} tokens, and the model or its KV cache holds {}\n  hint: use more --sessions",
        engine.sequence_limit()
    );
    let mut conversations = Vec::new();
    let mut pages = 0;
    for session in 0..args.sessions {
        let mut tokens = prompt(&tokenizer, session, prompt_tokens)?;
        let turn = answer(&engine, session, &tokens, args).await?;
        tokens.extend(&turn.ids);
        // The last token was drawn and not computed.
        pages += (tokens.len() - 1) / PAGE_TOKENS;
        tokens.extend(&second);
        conversations.push(tokens);
    }
    if let Some(tier) = &tier {
        written(tier, pages as u64).await?;
        if case == Case::DamagedFiles {
            damage(folder.path(), tier, args.sessions)?;
        }
    }
    let (mut report, mut answers) = (CaseReport { case: case.name(), ..CaseReport::default() }, Vec::new());
    let mut first_tokens = Vec::new();
    for (session, tokens) in (0..args.sessions).zip(&conversations) {
        let read = || tier.as_ref().map_or(0, |tier| tier.status().read_pages);
        let before = read();
        if case == Case::ReadAhead {
            engine.warm(&affinity(session), tokens.clone()).await;
        }
        let turn = answer(&engine, session, tokens, args).await?;
        report.prompt_tokens += turn.prompt;
        report.tiers.add(Tiers::of(turn.prompt, turn.cached, read() - before));
        first_tokens.push(turn.first_token.as_secs_f64() * 1e3);
        answers.push(turn.ids);
    }
    first_tokens.sort_by(f64::total_cmp);
    report.first_token_p50_ms = percentile(&first_tokens, 0.5);
    report.first_token_p90_ms = percentile(&first_tokens, 0.9);
    drop(engine);
    if let Some(tier) = tier {
        tokio::task::block_in_place(|| tier.flush());
        let status = tier.status();
        (report.damaged_pages, report.dropped_pages) = (status.damaged_pages, status.dropped_pages);
        report.page_bytes = status.used_bytes / status.pages.max(1);
    }
    Ok((report, answers))
}

/// Waits until everything that was computed is on disk, or was dropped.
async fn written(tier: &DiskTier, pages: u64) -> Result<()> {
    let begun = Instant::now();
    loop {
        let status = tier.status();
        if status.pages + status.dropped_pages >= pages && status.queued_bytes == 0 {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < WRITTEN_WITHIN,
            "the disk takes too long to write {pages} pages: {status:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Damages a page in the middle of each session.
fn damage(folder: &Path, tier: &DiskTier, sessions: u32) -> Result<()> {
    let status = tier.status();
    ensure!(status.pages > 0, "no pages are on disk");
    let (slot_bytes, of_session) = (status.used_bytes / status.pages, status.pages / u64::from(sessions));
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "pages") {
            continue;
        }
        let file = std::fs::OpenOptions::new().write(true).open(&path)?;
        for session in 0..u64::from(sessions) {
            let slot = session * of_session + of_session / 2;
            file.write_all_at(b"these bytes were damaged", slot * slot_bytes + slot_bytes / 2)?;
        }
    }
    Ok(())
}

/// Returns a text of a session, whose first tokens no other session has.
fn prompt(tokenizer: &Tokenizer, session: u32, tokens: usize) -> Result<Vec<u32>> {
    let rules = (0..tokens as u32).map(|rule| {
        let (weight, place) = ((rule * 7 + session) % 31, (rule + session) % 9);
        format!("Rule {rule}: a parcel of {weight} kg goes to warehouse {place}. ")
    });
    let text = format!("{session} is the number of this customer. {}", rules.collect::<String>());
    let mut encoded = tokenizer.encode(&text, SpecialTokens::Literal)?;
    encoded.truncate(tokens);
    Ok(encoded)
}

fn affinity(session: u32) -> Affinity {
    Affinity {
        tenant: "bench".to_owned(),
        agent: Some("bench".to_owned()),
        session: Some(session.to_string()),
        ..Affinity::default()
    }
}

async fn answer(engine: &Engine, session: u32, prompt: &[u32], args: &Args) -> Result<Turn> {
    let mut request = GenerateRequest::new(prompt.to_vec());
    request.sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    request.max_tokens = Some(args.answer_tokens as usize);
    request.ignore_eos = true;
    request.affinity = affinity(session);
    let begun = Instant::now();
    let mut stream = engine.generate(request)?;
    let mut first_token = None;
    while let Some(event) = stream.next().await {
        match event? {
            TokenEvent::Token(_) => {
                first_token.get_or_insert_with(|| begun.elapsed());
            }
            TokenEvent::Finished(finished) => {
                return Ok(Turn {
                    ids: finished.tokens,
                    first_token: first_token.context("the answer has no token")?,
                    prompt: finished.usage.prompt_tokens.into(),
                    cached: finished.usage.cached_tokens.into(),
                });
            }
            _ => {}
        }
    }
    bail!("the answer ended without a result")
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Case::NoDisk => "no disk",
            Case::Disk => "disk",
            Case::ReadAhead => "disk, read ahead",
            Case::NarrowDisk => "narrow disk",
            Case::FullDisk => "full disk",
            Case::SlowDisk => "slow disk",
            Case::DamagedFiles => "damaged files",
        }
    }

    /// Returns the bytes that the disk gives in a second, if it is not to be as fast as it can be. `measured` are the cases before,
    /// with a turn of each session.
    fn read_rate(self, measured: &[CaseReport], sessions: u32) -> Option<u64> {
        match self {
            Case::SlowDisk => Some(SLOW_DISK),
            Case::NarrowDisk => {
                let of = |case: Case| measured.iter().find(|report| report.case == case.name());
                let (computing, disk) = (of(Case::NoDisk)?, of(Case::Disk)?);
                let prompt = computing.prompt_tokens as f64 / f64::from(sessions);
                let tokens_per_s = prompt / (computing.first_token_p50_ms / 1e3);
                Some((NARROW_DISK * tokens_per_s / PAGE_TOKENS as f64 * disk.page_bytes as f64) as u64)
            }
            Case::NoDisk | Case::Disk | Case::ReadAhead | Case::FullDisk | Case::DamagedFiles => None,
        }
    }

    /// Returns whether the host has to decide by itself between reading and computing.
    fn decides(self) -> bool {
        matches!(self, Case::SlowDisk | Case::NarrowDisk)
    }

    fn tier(self, folder: &Path, read_rate: Option<u64>) -> Result<Option<Arc<DiskTier>>> {
        if self == Case::NoDisk {
            return Ok(None);
        }
        let options = TierOptions {
            folder: folder.to_owned(),
            max_bytes: 1 << 40,
            min_free_percent: if self == Case::FullDisk { 100 } else { 0 },
            write_bytes_per_s: 1 << 40,
            read_bytes_per_s: read_rate,
            queue_bytes: 1 << 30,
            reads_always: !self.decides(),
            shares: TierShares::default(),
            key: None,
            name_key: None,
        };
        Ok(Some(Arc::new(DiskTier::open(options)?)))
    }
}

impl Tiers {
    /// Divides a prompt of which `cached` tokens were not computed, after so many pages were read.
    fn of(prompt: u64, cached: u64, read_pages: u64) -> Self {
        let disk = cached.min(read_pages * PAGE_TOKENS as u64);
        Tiers { memory: cached - disk, disk, computed: prompt.saturating_sub(cached) }
    }

    fn add(&mut self, other: Tiers) {
        self.memory += other.memory;
        self.disk += other.disk;
        self.computed += other.computed;
    }
}

impl Report {
    fn for_people(&self) -> Result<()> {
        let Report { model, kv, kv_tokens, sessions, .. } = self;
        out::line(&format!(
            "{model}, {kv} keys and values: {sessions} sessions, {WORKING_SETS} times the {kv_tokens} tokens in memory"
        ))?;
        let row = |case: &CaseReport| {
            let percent = |tokens: u64| format!("{:.1} %", 100.0 * tokens as f64 / case.prompt_tokens as f64);
            let Tiers { memory, disk, computed } = case.tiers;
            [
                case.case.to_owned(),
                percent(memory),
                percent(disk),
                percent(computed),
                format!("{:.0} ms", case.first_token_p50_ms),
                format!("{:.0} ms", case.first_token_p90_ms),
                case.damaged_pages.to_string(),
                case.dropped_pages.to_string(),
                format!("{}/{sessions}", case.same_answers),
            ]
        };
        let rows: Vec<_> = self.cases.iter().map(row).collect();
        let header = ["CASE", "MEMORY", "DISK", "COMPUTED", "P50", "P90", "DAMAGED", "DROPPED", "SAME"];
        out::table(header, &rows)?;
        out::line("MEMORY, DISK, COMPUTED: shares of the prompts; P50, P90: time to the first token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_divided_by_where_its_pages_came_from() {
        let page = PAGE_TOKENS as u64;
        let tiers = |memory, disk, computed| Tiers { memory, disk, computed };
        assert_eq!(Tiers::of(100, 0, 0), tiers(0, 0, 100));
        assert_eq!(Tiers::of(10 * page + 3, 10 * page, 4), tiers(6 * page, 4 * page, 3));
        assert_eq!(Tiers::of(100, 2 * page, 5), tiers(0, 2 * page, 100 - 2 * page), "read and not used");
    }

    #[test]
    fn a_full_disk_takes_no_page_and_a_limited_one_leaves_the_choice_to_the_host() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Case::NoDisk.tier(folder.path(), None).unwrap().is_none());
        let full = Case::FullDisk.tier(folder.path(), None).unwrap().unwrap();
        assert_eq!(full.writable_bytes(), 0);
        drop(full);
        for (case, rate) in [(Case::SlowDisk, Some(SLOW_DISK)), (Case::NarrowDisk, Some(1 << 30))] {
            assert!(!case.tier(folder.path(), rate).unwrap().unwrap().reads_always());
        }
        assert!(Case::Disk.tier(folder.path(), None).unwrap().unwrap().reads_always());
    }

    #[test]
    fn a_narrow_disk_is_half_as_fast_again_as_computing() {
        let of = |case: Case, page_bytes| CaseReport {
            case: case.name(),
            prompt_tokens: 4 * 1600,
            first_token_p50_ms: 1000.0,
            page_bytes,
            ..CaseReport::default()
        };
        let measured = [of(Case::NoDisk, 0), of(Case::Disk, 4096)];
        // 100 pages are computed in a second.
        assert_eq!(Case::NarrowDisk.read_rate(&measured, 4), Some(150 * 4096));
        assert_eq!(Case::FullDisk.read_rate(&measured, 4), None);
    }
}
