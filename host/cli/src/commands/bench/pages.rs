//! `skep bench pages`: what a KV page costs on its way out of an executor, to a disk or to another host, and back, by its size.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use skep_engine::{
    Digest, DiskTier, PageNamer, PageRead, PageWrite, SealingSecret, TierOptions, TierShares, TransitSeal,
};
use skep_model::{ExecutorOptions, KvDtype, LoadedModel, PAGE_TOKENS, PageId};
use skep_transfer::{DEVICES_VARIABLE, TransferAgent};

use crate::catalog;
use crate::commands::out;
use crate::kv_transfer::{TransferSetting, TransferSettings};
use crate::paths;
use crate::progress::Terminal;

/// Tenant and weights of the measured pages.
const NAME: &str = "bench";
/// Number of pages that are read at once through NIXL, as hosts do.
const READ_AT_ONCE: usize = 8;
/// Time within which a page is read, or a helper starts.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of bytes of all pages of a size.
const MOST_BYTES: usize = 1 << 30;
const NIXL_MB: u32 = 256;

/// Measure what a KV page costs by its size: copies, disk, seals, and reads of another host's memory
///
/// Each page of the model is copied out of the executor and back. Then pages of this size and of others are written to a disk and
/// read back, from the memory of the operating system as after most restarts of a host; sealed and opened, as for each way
/// between hosts; and read in the memory of another process through NIXL, if its library is named with SKEP_NIXL. What another host
/// gives costs a seal there, its way, an opened seal and a copy here.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench pages
  SKEP_NIXL=nixl skep bench pages --kib 64,512,2048 --folder /mnt/nvme
  skep bench pages --json | jq '.rows[] | {bytes, disk_read_us, open_us}'")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Format of keys and values: f16, f32 or i8
    #[arg(long, value_name = "FORMAT", default_value_t = KvDtype::F16)]
    kv: KvDtype,
    /// Sizes of further pages, in KiB
    #[arg(long, value_name = "KIB", value_delimiter = ',', default_values_t = [64, 512, 2048, 8192], value_parser = clap::value_parser!(u32).range(1..=65_536))]
    kib: Vec<u32>,
    /// Number of pages of each size
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pages: u16,
    /// Folder on the disk to measure [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    kv: String,
    pages: u16,
    rows: Vec<Row>,
}

/// The mean times for a page of one size, in microseconds.
#[derive(Debug, Serialize)]
struct Row {
    bytes: usize,
    /// Copies out of the executor and into it, for pages of the model.
    copy_out_us: Option<f64>,
    copy_in_us: Option<f64>,
    disk_write_us: f64,
    disk_read_us: f64,
    seal_us: f64,
    open_us: f64,
    /// `None` without the library.
    nixl_us: Option<f64>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let model = catalog::resolve(&args.model, &Terminal)?;
    let (bytes, copied) = copies(&model.path, args)?;
    let agents = agents()?;
    let mut rows = vec![measure(bytes, Some(copied), args, agents.as_ref())?];
    for kib in &args.kib {
        rows.push(measure(*kib as usize * 1024, None, args, agents.as_ref())?);
    }
    let report = Report { model: model.name, kv: args.kv.to_string(), pages: args.pages, rows };
    if args.json { out::json(&report) } else { report.for_people() }
}

/// Returns the size of a page of the model, and the mean times of a copy out of the executor and into it.
fn copies(path: &Path, args: &Args) -> Result<(usize, [f64; 2])> {
    let count = usize::from(args.pages);
    let kv_tokens = Some(count * PAGE_TOKENS);
    let options = ExecutorOptions { kv: args.kv, kv_tokens, ..ExecutorOptions::default() };
    let mut model = LoadedModel::open("model", path, options)
        .with_context(|| format!("cannot load {}", path.display()))?;
    let form = model.executor.page_form().context("pages of this model cannot leave the executor")?;
    let mut page = vec![0; form.bytes];
    let mut copy = |is_out: bool| {
        // The first round touches all memory.
        let mut took = Duration::ZERO;
        for _ in 0..2 {
            let began = Instant::now();
            for number in 0..count as u32 {
                match is_out {
                    true => model.executor.read_pages(&[PageId(number)], &mut page)?,
                    false => model.executor.write_pages(&[PageId(number)], &page)?,
                }
            }
            took = began.elapsed();
        }
        Ok::<_, anyhow::Error>(mean_us(took, count))
    };
    let copied = [copy(true)?, copy(false)?];
    Ok((page.len(), copied))
}

fn measure(
    bytes: usize,
    copied: Option<[f64; 2]>,
    args: &Args,
    agents: Option<&[TransferAgent; 2]>,
) -> Result<Row> {
    let count = usize::from(args.pages).min(MOST_BYTES / bytes).max(1);
    let page: Vec<u8> = (0..bytes).map(|at| ((at * 31) >> 4) as u8).collect();
    let [disk_write_us, disk_read_us] = disk(&page, count, args.folder.as_deref())?;
    let (seal, layout) = (TransitSeal::new(&SealingSecret([7; 32])), Digest([1; 32]));
    let began = Instant::now();
    let images: std::io::Result<Vec<Vec<u8>>> =
        (0..count).map(|_| seal.seal(layout, Digest([2; 32]), &page)).collect();
    let images = images?;
    let seal_us = mean_us(began.elapsed(), count);
    let image = images[0].clone();
    let began = Instant::now();
    for image in images {
        let opened = seal.open(layout, Digest([2; 32]), bytes, image)?;
        ensure!(opened.len() == bytes, "a page has another length after it was opened");
    }
    let open_us = mean_us(began.elapsed(), count);
    let nixl_us = agents.map(|agents| nixl(agents, &image, count)).transpose()?;
    let [copy_out_us, copy_in_us] = copied.map_or([None; 2], |copied| copied.map(Some));
    Ok(Row { bytes, copy_out_us, copy_in_us, disk_write_us, disk_read_us, seal_us, open_us, nixl_us })
}

/// Writes pages to a disk and reads them back. Returns the mean times.
fn disk(page: &[u8], count: usize, folder: Option<&Path>) -> Result<[f64; 2]> {
    let folder = folder.map_or_else(tempfile::tempdir, tempfile::tempdir_in);
    let folder = folder.context("cannot create a temporary folder")?;
    let tier = DiskTier::open(TierOptions {
        folder: folder.path().to_owned(),
        max_bytes: 1 << 40,
        min_free_percent: 0,
        write_bytes_per_s: 1 << 40,
        read_bytes_per_s: None,
        queue_bytes: 1 << 40,
        reads_always: true,
        shares: TierShares::default(),
        key: None,
        name_key: None,
    })?;
    let keys: PageNamer = tier.keys().clone();
    let layout = tier.layout(keys.layout(NAME, NAME), page.len())?;
    let tokens: Vec<u32> = (0..(count * PAGE_TOKENS) as u32).collect();
    let names = keys.prefixes(NAME, &tokens, PAGE_TOKENS);
    let began = Instant::now();
    for (number, prefix) in names.iter().enumerate() {
        let parent = number.checked_sub(1).map(|before| names[before]);
        let (tenant, owner) = (keys.tenant(NAME), keys.owner(None, None));
        let write = PageWrite { layout, prefix: *prefix, parent, tenant, owner, bytes: page.to_vec() };
        ensure!(tier.write(write), "the disk does not take a page");
    }
    tier.flush();
    let written = mean_us(began.elapsed(), count);
    let found = tier.leading(layout, &names);
    ensure!(found == count, "{found} of {count} pages were written: {:?}", tier.status());
    let began = Instant::now();
    let mut pages = tier.read(layout, names).context("the disk is busy")?;
    for _ in 0..count {
        match pages.next_within(PATIENCE) {
            PageRead::Page(_) => {}
            PageRead::NotYet | PageRead::Ended => bail!("a page cannot be read: {:?}", tier.status()),
        }
    }
    Ok([written, mean_us(began.elapsed(), count)])
}

/// Starts two helpers, if the library of NIXL is named.
fn agents() -> Result<Option<[TransferAgent; 2]>> {
    let settings =
        TransferSettings { lane: TransferSetting::Auto, nixl_mb: NIXL_MB, ..TransferSettings::default() };
    let Some(library) = settings.library(paths::nixl_folder())? else { return Ok(None) };
    let devices = std::env::var(DEVICES_VARIABLE).ok();
    let start = |name: &str| {
        let options = settings.helper(name.to_owned(), library.clone(), devices.clone())?;
        let agent = TransferAgent::start(options)?;
        agent.wait_until_ready(PATIENCE)?;
        Ok::<_, anyhow::Error>(agent)
    };
    Ok(Some([start("bench-there")?, start("bench-here")?]))
}

/// Reads images in the memory of another helper, a few at a time. Returns the mean time, without that of writing and copying them.
fn nixl([there, here]: &[TransferAgent; 2], image: &[u8], count: usize) -> Result<f64> {
    let mut loan = there.lend(READ_AT_ONCE, image.len()).context("there is no room for a page")?;
    let images = loan.images().min(here.reserve(READ_AT_ONCE, image.len()).map_or(0, |room| room.images()));
    ensure!(images > 0, "there is no room for a page");
    loan.truncate(images);
    (0..images).try_for_each(|at| loan.write(at, image))?;
    let (mut took, mut read) = (Duration::ZERO, 0);
    // The first read connects both.
    for round in 0..=count.div_ceil(images) {
        let room = here.reserve(images, image.len()).context("there is no room for a page")?;
        let began = Instant::now();
        let arrived = room.read(loan.peer(), &loan.addresses(), PATIENCE)?;
        if round > 0 {
            took += began.elapsed();
            read += images;
        }
        ensure!(arrived.image(0)? == image, "a page has changed on its way");
    }
    Ok(mean_us(took, read))
}

fn mean_us(took: Duration, count: usize) -> f64 {
    took.as_secs_f64() * 1e6 / count.max(1) as f64
}

impl Report {
    fn for_people(&self) -> Result<()> {
        let Report { model, kv, pages, rows } = self;
        out::line(&format!(
            "{model}, {kv} keys and values, {pages} pages of each size; microseconds a page"
        ))?;
        let row = |row: &Row| {
            let us = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.0}"));
            [
                format!("{:.0} KiB", row.bytes as f64 / 1024.0),
                us(row.copy_out_us),
                us(row.copy_in_us),
                us(Some(row.disk_write_us)),
                us(Some(row.disk_read_us)),
                us(Some(row.seal_us)),
                us(Some(row.open_us)),
                us(row.nixl_us),
                row.nixl_us.map_or_else(|| "-".to_owned(), |us| format!("{:.0} MB/s", row.bytes as f64 / us)),
            ]
        };
        let header =
            ["PAGE", "COPY OUT", "COPY IN", "DISK WRITE", "DISK READ", "SEAL", "OPEN", "NIXL", "NIXL RATE"];
        out::table(header, &rows.iter().map(row).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_size_are_measured_on_a_disk_and_sealed() {
        let args = Args {
            model: String::new(),
            kv: KvDtype::F16,
            kib: Vec::new(),
            pages: 3,
            folder: None,
            json: false,
        };
        let row = measure(5000, Some([1.0, 2.0]), &args, None).unwrap();
        assert_eq!(
            (row.bytes, row.copy_out_us, row.copy_in_us, row.nixl_us),
            (5000, Some(1.0), Some(2.0), None)
        );
        let times = [row.disk_write_us, row.disk_read_us, row.seal_us, row.open_us];
        assert!(times.iter().all(|us| *us > 0.0), "{row:?}");
        assert_eq!(mean_us(Duration::from_millis(3), 4), 750.0);
    }
}
