//! `skep top`: the figures of a host's engines in the terminal, live.

mod history;
mod view;

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use skep_api::EngineSample;
use tokio::sync::mpsc;

use super::HostArgs;
use crate::client::{Client, Follower};
use history::History;
use view::{Connection, Screen};

/// Delay before a lost host is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// Watch the engines of a running host: tokens, latencies, cache and memory, each second
///
/// The curves cover the last minutes; the console at /ui shows the last hour. A key with the role `read` suffices.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Keys:
  left, right   the previous or next model
  q             quit

Examples:
  skep top
  skep top --url http://gpu-7:8080")]
pub struct Args {
    #[command(flatten)]
    host: HostArgs,
}

/// A reason to draw the screen again.
enum Wake {
    Sample(EngineSample),
    Lost(String),
    Key(KeyEvent),
    Resized,
}

/// Draws the figures each second, until the user quits.
pub async fn run(args: Args) -> Result<()> {
    if !std::io::stdout().is_terminal() {
        bail!(
            "`skep top` draws on a terminal, and the output is not one\n  hint: `skep status --json` prints the state once, and GET /v1/engine the figures of the last hour"
        );
    }
    let client = args.host.client()?;
    // The first answer comes before the screen is taken, so that an error stays readable.
    let mut history = History::new(client.engine_figures(view::SECONDS).await?);
    let (wake, mut woken) = mpsc::channel(64);
    let keys = wake.clone();
    // The thread ends with the process, because reading a key cannot be interrupted.
    std::thread::spawn(move || read_keys(&keys));
    let following = tokio::spawn(follow(client.clone(), wake));
    let mut screen = Screen::new(client.address());
    let mut terminal = ratatui::try_init().context("the terminal cannot be drawn on")?;
    let ended = loop {
        if let Err(error) = terminal.draw(|frame| view::draw(frame, &history, &screen)) {
            break Err(error).context("the terminal cannot be drawn on");
        }
        match woken.recv().await {
            None => break Ok(()),
            Some(Wake::Sample(sample)) => {
                screen.connection = Connection::Live;
                history.add(sample);
            }
            Some(Wake::Lost(why)) => screen.connection = Connection::Lost(why),
            Some(Wake::Resized) => {}
            Some(Wake::Key(key)) => {
                if is_quit(&key) {
                    break Ok(());
                }
                screen.select(&key, history.models().len());
            }
        }
    };
    following.abort();
    ratatui::restore();
    ended
}

fn is_quit(key: &KeyEvent) -> bool {
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
        || (key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL))
}

fn read_keys(wake: &mpsc::Sender<Wake>) {
    loop {
        let woken = match event::read() {
            Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => Wake::Key(key),
            Ok(Event::Resize(..)) => Wake::Resized,
            Ok(_) => continue,
            Err(_) => return,
        };
        if wake.blocking_send(woken).is_err() {
            return;
        }
    }
}

/// Sends the samples of the host, and connects again when it is lost.
async fn follow(client: Client, wake: mpsc::Sender<Wake>) {
    loop {
        let lost = match client.follow_engine().await {
            Ok(followed) => forward(followed, &wake).await,
            Err(error) => error,
        };
        if wake.send(Wake::Lost(format!("{lost:#}"))).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Sends samples until the stream breaks off, and returns why it did.
async fn forward(mut followed: Follower<EngineSample>, wake: &mpsc::Sender<Wake>) -> anyhow::Error {
    loop {
        match followed.next().await {
            Ok((_, sample)) => {
                if wake.send(Wake::Sample(sample)).await.is_err() {
                    return anyhow::anyhow!("the screen is closed");
                }
            }
            Err(error) => return error,
        }
    }
}
