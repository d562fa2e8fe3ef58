//! A download that survives cut connections, full disks and the end of its process.
//!
//! The part that has arrived is kept beside the target with the ETag that it belongs to. The file appears at the target only
//! when it is complete and has the expected digest.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use indicatif::DecimalBytes;
use reqwest::Method;
use reqwest::header::RANGE;

use super::answer::{checked, continues_at, is_transient};
use super::{Description, HubClient, RemoteFile};
use crate::catalog::{checksum, space, with_end};

/// Number of times in a row that a download is resumed without receiving [`PROGRESS_BYTES`].
const RETRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Number of bytes after which a connection was worth it, so that the count of retries starts again.
const PROGRESS_BYTES: u64 = 1 << 20;

impl HubClient {
    /// Downloads a file to `target`, and resumes an earlier download of the same contents. `advance` gets the number of
    /// bytes that are here, and `checking` is called before the digest is computed.
    pub(in super::super) async fn download(
        &self,
        file: RemoteFile<'_>,
        expected: &Description,
        target: &Path,
        advance: &(dyn Fn(u64) + Sync),
        checking: &(dyn Fn() + Sync),
    ) -> Result<()> {
        let partial = partial_path(target);
        let etag = etag_path(target);
        if resumable(target, expected) == 0 {
            remove_if_present(&partial)?;
        }
        // The ETag is written first: a partial file without one is not resumed.
        std::fs::write(&etag, expected.etag.as_deref().unwrap_or_default())
            .map_err(|error| full_or(error, file.name, target, 0, expected.bytes))?;
        let (mut attempt, mut had) = (0, 0);
        while let Err(error) = self.receive(file, expected, &partial, advance).await {
            if !is_transient(&error) {
                return Err(error);
            }
            let has = length(&partial);
            attempt = if has >= had + PROGRESS_BYTES { 1 } else { attempt + 1 };
            had = has;
            if attempt > RETRIES {
                return Err(
                    error.context("the download was interrupted\n  hint: run the command again; it resumes")
                );
            }
            tokio::time::sleep(FIRST_PAUSE * 2u32.pow(attempt)).await;
        }
        if let Some(digest) = &expected.sha256 {
            checking();
            let verified = checksum::verify(&partial, expected.bytes, digest);
            verified
                .inspect_err(|_| [&partial, &etag].map(std::fs::remove_file).into_iter().for_each(drop))?;
        }
        std::fs::rename(&partial, target)?;
        remove_if_present(&etag)
    }

    /// Receives what `partial` still lacks.
    async fn receive(
        &self,
        file: RemoteFile<'_>,
        expected: &Description,
        partial: &Path,
        advance: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        let bytes = expected.bytes;
        let mut out = File::options().create(true).append(true).open(partial)?;
        let mut received = out.metadata()?.len();
        if received > bytes {
            out.set_len(0)?;
            received = 0;
        }
        advance(received);
        if received == bytes {
            return Ok(());
        }
        let mut request = self.request(&self.download, Method::GET, self.file_url(file)?);
        if received > 0 {
            request = request.header(RANGE, format!("bytes={received}-"));
        }
        let mut response = checked(self.send(request).await?, file.name)?;
        if received > 0 && !continues_at(&response, received, bytes) {
            out.set_len(0)?;
            received = 0;
        }
        while let Some(chunk) = response.chunk().await? {
            received += chunk.len() as u64;
            if received > bytes {
                bail!("the hub sends more than the {bytes} bytes of {}", file.name);
            }
            out.write_all(&chunk)
                .map_err(|error| full_or(error, file.name, partial, length(partial), bytes))?;
            advance(received);
        }
        out.sync_all().map_err(|error| full_or(error, file.name, partial, length(partial), bytes))?;
        if received < bytes {
            let error = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            return Err(error).with_context(|| format!("the download of {} ended early", file.name));
        }
        Ok(())
    }
}

/// Returns the number of bytes of a file that an earlier download left and that still belong to it.
pub(in super::super) fn resumable(target: &Path, described: &Description) -> u64 {
    let kept = std::fs::read_to_string(etag_path(target)).ok();
    match kept {
        Some(kept) if kept == described.etag.as_deref().unwrap_or_default() => {
            Some(length(&partial_path(target))).filter(|length| *length <= described.bytes).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Returns the path at which a download of `target` is kept until it is complete.
fn partial_path(target: &Path) -> PathBuf {
    with_end(target, ".part")
}

/// Returns the path of the ETag of what has arrived.
fn etag_path(target: &Path) -> PathBuf {
    with_end(target, ".part.etag")
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn remove_if_present(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Describes a failed write; a full disk says what is here and what to do.
fn full_or(error: std::io::Error, file: &str, path: &Path, received: u64, bytes: u64) -> anyhow::Error {
    if !space::is_exhausted(&error) {
        return anyhow!(error).context(format!("cannot write {}", path.display()));
    }
    let folder = path.parent().unwrap_or(path);
    anyhow!(
        "the disk of {} has no room for the rest of {file}: {} of {} are here ({error})\n  hint: free {} there (`skep model \
         rm` helps) and run the command again; it resumes",
        folder.display(),
        DecimalBytes(received),
        DecimalBytes(bytes),
        DecimalBytes(bytes - received.min(bytes))
    )
}
