//! `skep bench weights`: how fast a model's weights are loaded, beside what the drive reads.
//!
//! Every measurement but the one of files in memory begins with files that the operating system has dropped from its cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use rustix::fs::{Advice, OFlags, fadvise};
use serde::Serialize;
use skep_model::{Checkpoint, ExecutorOptions, ModelWeights, WeightConversion, physical_cores};

use super::median;
use crate::catalog;
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};

/// Number of bytes that a thread reads at once.
const BLOCK: usize = 4 << 20;
/// Alignment of buffers for reads that bypass the operating system's cache.
const ALIGNMENT: usize = 4096;
/// Number of threads that read without the cache, which keeps a drive with many queues busy.
const DIRECT_THREADS: usize = 4;

/// Measure how fast a model's weights are loaded, beside what the drive reads
///
/// The files are read from front to back by one thread, as dd reads them, then past the cache by several threads,
/// as fio can read them. Then the weights are loaded on the CPU: from files that are not in memory, the same once more,
/// and from files that are. The second load writes to memory that was just freed: a virtual machine may return memory that
/// is free for seconds to its host, from which it comes back more slowly than the files are read. The files are dropped from
/// the operating system's cache before each measurement but the last.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench weights --model qwen3-4b
  skep bench weights --model mixture.gguf --tp 2 --repeat 5
  skep bench weights --model mixture.gguf --weights q8_0 --json")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Threads that pack the weights [default: physical cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Tensor-parallel ranks, which share each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    tp: usize,
    /// Format to convert the weights to: q8_0, bf16 or keep
    #[arg(long, value_name = "FORMAT", default_value_t = WeightConversion::Keep)]
    weights: WeightConversion,
    /// Number of runs of each kind
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeat: u16,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    files: usize,
    /// Size of all files.
    file_bytes: u64,
    /// Size in the files of the weights that are loaded.
    weight_bytes: u64,
    threads: usize,
    tensor_parallel: usize,
    weights: String,
    /// Rate of one thread that reads the files from front to back.
    read_gb_per_s: f64,
    /// Rate of several threads past the cache. It is `None` where the file system refuses such reads.
    direct_gb_per_s: Option<f64>,
    /// Load from files that are not in memory.
    cold: Load,
    /// The same, right after another load has freed its memory.
    repeated: Load,
    /// Load from files that are in memory.
    warm: Load,
    /// Rates of the first two, as shares of the faster way to read.
    share: f64,
    repeated_share: f64,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Load {
    seconds: f64,
    gb_per_s: f64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let report = measure(args)?;
    if args.json { out::json(&report) } else { report.for_people() }
}

fn measure(args: &Args) -> Result<Report> {
    let model = catalog::resolve(&args.model, &Terminal)?;
    let cannot = || format!("cannot load {}", model.path.display());
    let (files, weight_bytes) = {
        let checkpoint = Checkpoint::open(&model.path).with_context(cannot)?;
        (checkpoint.paths().map(Path::to_owned).collect::<Vec<_>>(), checkpoint.weight_bytes())
    };
    let file_bytes = files.iter().map(|file| Ok(file.metadata()?.len())).sum::<Result<u64>>()?;
    let threads = args.threads.map_or_else(physical_cores, usize::from);
    let options = ExecutorOptions {
        threads: Some(threads),
        tensor_parallel: args.tp,
        weights: args.weights,
        ..ExecutorOptions::default()
    };
    let load = || -> Result<f64> {
        let started = Instant::now();
        let checkpoint = Checkpoint::open(&model.path).with_context(cannot)?;
        let weights = ModelWeights::load(&checkpoint, &options).with_context(cannot)?;
        let seconds = started.elapsed().as_secs_f64();
        drop(weights);
        Ok(seconds)
    };
    let step = Terminal.count(&format!("measuring {}", model.name), u64::from(args.repeat));
    let (mut read, mut direct) = (Vec::new(), Vec::new());
    let (mut cold, mut repeated, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..args.repeat {
        drop_from_cache(&files)?;
        read.push(seconds_to_read(&files, 1, OFlags::empty())?);
        drop_from_cache(&files)?;
        // Some file systems refuse reads past the cache; the other rates can be measured nevertheless.
        direct.extend(seconds_to_read(&files, DIRECT_THREADS, OFlags::DIRECT).ok());
        drop_from_cache(&files)?;
        cold.push(load()?);
        drop_from_cache(&files)?;
        repeated.push(load()?);
        warm.push(load()?);
        step.advance_to(u64::from(round) + 1);
    }
    step.finish("");
    let rate = |bytes: u64, seconds: f64| bytes as f64 / seconds / 1e9;
    let loaded = |mut seconds: Vec<f64>| {
        let seconds = median(&mut seconds);
        Load { seconds, gb_per_s: rate(weight_bytes, seconds) }
    };
    let [cold, repeated, warm] = [cold, repeated, warm].map(loaded);
    let read_gb_per_s = rate(file_bytes, median(&mut read));
    let direct_gb_per_s = (!direct.is_empty()).then(|| rate(file_bytes, median(&mut direct)));
    let fastest = read_gb_per_s.max(direct_gb_per_s.unwrap_or(0.0));
    Ok(Report {
        model: model.name,
        files: files.len(),
        file_bytes,
        weight_bytes,
        threads,
        tensor_parallel: args.tp,
        weights: args.weights.to_string(),
        read_gb_per_s,
        direct_gb_per_s,
        cold,
        repeated,
        warm,
        share: cold.gb_per_s / fastest,
        repeated_share: repeated.gb_per_s / fastest,
    })
}

/// Drops the files from the operating system's cache. What has not been written yet is written first.
fn drop_from_cache(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let dropped = File::open(path).and_then(|file| {
            file.sync_all()?;
            Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
        });
        dropped.with_context(|| format!("cannot drop {} from the cache", path.display()))?;
    }
    Ok(())
}

/// Returns the seconds that `threads` threads take to read all files together.
fn seconds_to_read(files: &[PathBuf], threads: usize, flags: OFlags) -> Result<f64> {
    let mut opened = Vec::with_capacity(files.len());
    for path in files {
        let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let length = file.metadata()?.len();
        opened.push((file, length));
    }
    let blocks: Vec<(&File, u64)> = opened
        .iter()
        .flat_map(|(file, length)| (0..*length).step_by(BLOCK).map(move |offset| (file, offset)))
        .collect();
    let next = AtomicUsize::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(|| read_blocks(&blocks, &next))).collect();
        readers.into_iter().try_for_each(|reader| {
            reader.join().map_err(|_| anyhow!("a thread that read the files has panicked"))?
        })
    })?;
    Ok(started.elapsed().as_secs_f64())
}

/// Reads blocks of files that no other thread has taken.
fn read_blocks(blocks: &[(&File, u64)], next: &AtomicUsize) -> Result<()> {
    let mut buffer = vec![0u8; BLOCK + ALIGNMENT];
    let start = buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    let buffer = &mut buffer[start..start + BLOCK];
    while let Some((file, offset)) = blocks.get(next.fetch_add(1, Relaxed)) {
        let mut read = 0;
        while read < BLOCK {
            match file.read_at(&mut buffer[read..], offset + read as u64)? {
                0 => break,
                bytes if !bytes.is_multiple_of(ALIGNMENT) => break,
                bytes => read += bytes,
            }
        }
    }
    Ok(())
}

impl Report {
    fn for_people(&self) -> Result<()> {
        let Report { model, files, file_bytes, threads, tensor_parallel, weights, .. } = self;
        out::line(&format!(
            "{model}: {:.2} GB in {files} files, {threads} threads, {tensor_parallel} ranks, weights {weights}",
            *file_bytes as f64 / 1e9
        ))?;
        out::line(&format!("  read    {:>6.2} GB/s by one thread", self.read_gb_per_s))?;
        if let Some(rate) = self.direct_gb_per_s {
            out::line(&format!("  direct  {rate:>6.2} GB/s by {DIRECT_THREADS} threads past the cache"))?;
        }
        let Load { seconds, gb_per_s } = self.cold;
        out::line(&format!(
            "  load    {gb_per_s:>6.2} GB/s in {seconds:.2} s, {:.0} % of the faster way to read",
            self.share * 100.0
        ))?;
        let Load { seconds, gb_per_s } = self.repeated;
        out::line(&format!(
            "  repeat  {gb_per_s:>6.2} GB/s in {seconds:.2} s, {:.0} %, in memory that was just freed",
            self.repeated_share * 100.0
        ))?;
        let Load { seconds, gb_per_s } = self.warm;
        out::line(&format!("  again   {gb_per_s:>6.2} GB/s in {seconds:.2} s from files in memory"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        args: Args,
    }

    fn fixture(name: &str) -> String {
        format!("{}/../../tests/fixtures/tiny/{name}", env!("CARGO_MANIFEST_DIR"))
    }

    fn measured(flags: &[&str]) -> Result<Report> {
        measure(&Wrapper::try_parse_from(["weights"].into_iter().chain(flags.iter().copied()))?.args)
    }

    #[test]
    fn a_load_is_measured_beside_the_reads_of_its_files() {
        for (name, tp) in [("llama-gqa", "1"), ("kimi-k2-int4", "2")] {
            let path = fixture(name);
            let report = measured(&["--model", &path, "--tp", tp, "--threads", "2", "--repeat", "1"]);
            let report = report.expect("measured");
            assert_eq!((report.files, report.tensor_parallel.to_string()), (1, tp.to_owned()));
            assert!(report.weight_bytes < report.file_bytes && report.weight_bytes > report.file_bytes / 2);
            assert!(report.read_gb_per_s > 0.0 && report.warm.seconds > 0.0);
            let fastest = report.read_gb_per_s.max(report.direct_gb_per_s.unwrap_or(0.0));
            for (load, share) in [(report.cold, report.share), (report.repeated, report.repeated_share)] {
                assert!(load.seconds > 0.0);
                assert!((share * fastest / load.gb_per_s - 1.0).abs() < 1e-9, "{report:?}");
            }
            report.for_people().expect("printed");
        }
        let error = measured(&["--model", &fixture("kimi-k2-int4"), "--tp", "3"]).expect_err("3 ranks");
        assert!(format!("{error:#}").contains("possible values"), "{error:#}");
    }

    #[test]
    fn every_block_is_read_by_one_thread() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = [3 * BLOCK + 5, 1].map(|length| {
            let path = folder.path().join(length.to_string());
            std::fs::write(&path, vec![7u8; length]).expect("written");
            path
        });
        drop_from_cache(&files).expect("dropped");
        for threads in [1, 3] {
            assert!(seconds_to_read(&files, threads, OFlags::empty()).expect("read") > 0.0);
        }
        assert!(seconds_to_read(&[folder.path().join("none")], 1, OFlags::empty()).is_err());
    }
}
