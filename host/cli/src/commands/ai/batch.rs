//! `skep ai batch`: queues a file of requests, and can wait for the answers.

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use skep_api::{BatchPhase, BatchStatus};

use crate::client::Client;
use crate::commands::{HostArgs, out};
use crate::failure::Usage;
use crate::progress::{Progress as _, Terminal};

/// Interval between reads of a batch's state.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum size of a batch that a host accepts.
const MAX_FILE_BYTES: u64 = 9_500_000;

/// Have a file of requests answered when the host has capacity for them
///
/// The file has one request per line: a JSON object with `prompt` or `messages`, any other fields of a
/// request, and an optional `external_reference` of your own; or a JSON string, which is a prompt. The host
/// stores the batch, processes it when no interactive request is waiting, and continues after a restart.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep ai batch questions.jsonl                                   prints the batch's id
  skep ai batch questions.jsonl --wait --output answers.jsonl
  skep ai batch questions.jsonl --model agent:concierge --wait | jq -r .result.response
  skep ai status $(skep ai batch questions.jsonl) --results")]
pub struct Args {
    /// File with the requests, one per line
    file: PathBuf,
    /// Name of the model, or agent:NAME
    #[arg(long, short, default_value = "default")]
    model: String,
    /// Wait for the answers and write them, one JSON object per line, in the order of the requests
    #[arg(long, short)]
    wait: bool,
    /// File to write the answers to [default: standard output]
    #[arg(long, short, value_name = "FILE", requires = "wait")]
    output: Option<PathBuf>,
    #[command(flatten)]
    host: HostArgs,
    /// Print the state of the batch as JSON; with --wait, after it has finished, to stderr
    #[arg(long)]
    json: bool,
}

/// Queues the requests, and prints the id of the batch, or its answers once they are complete.
pub async fn run(args: Args) -> Result<()> {
    let requests = read(&args.file)?;
    let client = args.host.client()?;
    let queued = client.ai_queue(&args.model, &requests).await?;
    if !args.wait {
        return if args.json { out::json(&queued) } else { out::line(&queued.request_id) };
    }
    let status = wait(&client, &queued.request_id).await?;
    write_answers(&client, &status, args.output.as_deref()).await?;
    if args.json {
        eprintln!("{}", serde_json::to_string(&status)?);
    }
    let failed = status.items.failed + status.items.cancelled;
    if failed > 0 {
        bail!(
            "{failed} of {} requests have no answer; their errors are among the results",
            status.items.total
        );
    }
    Ok(())
}

/// Waits until a batch has finished, and shows its progress.
async fn wait(client: &Client, id: &str) -> Result<BatchStatus> {
    let mut status = client.ai_batch(id).await?;
    let step = Terminal.count(&format!("batch {id}"), status.items.total);
    while matches!(status.status, BatchPhase::Queued | BatchPhase::Running) {
        tokio::time::sleep(POLL_INTERVAL).await;
        status = client.ai_batch(id).await?;
        step.advance_to(status.items.total - status.items.waiting - status.items.running);
    }
    step.finish(&format!("{} answered, {} failed", status.items.done, status.items.failed));
    Ok(status)
}

/// Writes the answers of a finished batch.
pub(super) async fn write_answers(
    client: &Client,
    status: &BatchStatus,
    output: Option<&Path>,
) -> Result<()> {
    let answers = client.ai_answers(status).await?;
    let Some(path) = output else {
        return answers.responses.iter().try_for_each(out::json_line);
    };
    let cannot = || format!("cannot write {}", path.display());
    let mut file = BufWriter::new(std::fs::File::create(path).with_context(cannot)?);
    for response in &answers.responses {
        serde_json::to_writer(&mut file, response).with_context(cannot)?;
        file.write_all(b"\n").with_context(cannot)?;
    }
    file.flush().with_context(cannot)
}

fn read(path: &Path) -> Result<Vec<Value>> {
    let cannot = || format!("cannot read {}", path.display());
    let bytes = std::fs::metadata(path).with_context(cannot)?.len();
    if bytes > MAX_FILE_BYTES {
        bail!(
            "{} has {bytes} bytes, more than the {MAX_FILE_BYTES} of one batch\n  hint: split it into several batches: split -C 9m {}",
            path.display(),
            path.display()
        );
    }
    let text = std::fs::read_to_string(path).with_context(cannot)?;
    requests(&text).map_err(|wrong| Usage(format!("{}: {wrong}", path.display())).into())
}

fn requests(text: &str) -> Result<Vec<Value>, String> {
    let mut requests = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let request = match serde_json::from_str(line) {
            Ok(request @ Value::Object(_)) => request,
            Ok(Value::String(prompt)) => json!({ "prompt": prompt }),
            Ok(_) => return Err(format!("line {} is neither a JSON object nor a string", index + 1)),
            // The parser counts lines from the start of this one.
            Err(error) => {
                let wrong = error.to_string().replace(&format!("line {} column", error.line()), "column");
                return Err(format!("line {} is not JSON: {wrong}", index + 1));
            }
        };
        requests.push(request);
    }
    if requests.is_empty() {
        return Err("it has no requests; write one per line".to_owned());
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_requests_or_prompts_and_errors_name_the_line() {
        let read =
            requests("{\"prompt\": \"a\", \"external_reference\": \"1\"}\n\n\"b\"\n").expect("two requests");
        assert_eq!(read, [json!({"prompt": "a", "external_reference": "1"}), json!({"prompt": "b"})]);
        for (text, place) in
            [("\"a\"\n7\n", "line 2"), ("\"a\"\n\n{\n", "line 3"), ("\n", "it has no requests")]
        {
            let error = requests(text).expect_err("it cannot be read");
            assert!(error.starts_with(place), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_file_and_the_line() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("bad.jsonl");
        std::fs::write(&path, "oops\n").expect("file");
        let error = read(&path).expect_err("no JSON");
        let expected = format!("{}: line 1 is not JSON: expected value at column 1", path.display());
        assert_eq!((format!("{error:#}"), error.is::<Usage>()), (expected, true));
    }
}
