//! `skep chat`: a conversation with an agent in the terminal.

use std::io::IsTerminal as _;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use rustyline::error::ReadlineError;
use skep_api::Session;

use super::{HostArgs, out, turn_printer};
use crate::client::Client;
use crate::failure::{self, Refused};
use crate::style;

const HELP: &str = "  /session NAME  switch to another session\n  /help          show this help\n  /quit          leave (or Ctrl-D)\n  Ctrl-C         cancel an answer";

/// Talk to an agent, and see its answers while they are generated
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep chat concierge
  skep chat concierge --session room-7
  skep chat concierge --new                       in a session of its own
  printf 'My name is Ada.\\nWhat is my name?\\n' | skep chat concierge")]
pub struct Args {
    /// Name of the agent
    agent: String,
    /// Session to talk in; the agent remembers each session separately
    #[arg(long, short, default_value = "chat")]
    session: String,
    /// Start a new session (named chat-...) instead of continuing one
    #[arg(long, conflicts_with = "session")]
    new: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Reads messages from the terminal, and prints the replies until the input ends.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    // A wrong name is reported before anything is typed.
    client.find_agent(&args.agent).await?;
    let session = if args.new { new_session() } else { args.session };
    let mut chat = Chat { client, agent: args.agent, session };
    chat.tell_session().await?;
    if std::io::stdin().is_terminal() { chat.interactive().await } else { chat.piped().await }
}

/// Returns the name of a session that did not exist a second ago: the time in it sorts the sessions by age.
fn new_session() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("chat-{}", now.as_millis())
}

struct Chat {
    client: Client,
    agent: String,
    session: String,
}

fn greeting(agent: &str, session: &str, known: Option<&Session>) -> String {
    match known {
        None => format!("talking to {agent} in the new session {session}"),
        Some(Session { turns, updated_at_ms, .. }) => format!(
            "talking to {agent}; continuing session {session}: {}, the last {} (--new starts another session)",
            out::count(*turns, "turn"),
            out::ago(*updated_at_ms)
        ),
    }
}

/// The meaning of a line that was typed.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Nothing,
    Help,
    Quit,
    Session(&'a str),
    Unknown(&'a str),
    Say(&'a str),
}

fn parse(line: &str) -> Line<'_> {
    let line = line.trim();
    match line.strip_prefix('/').map(|command| command.split_once(' ').unwrap_or((command, ""))) {
        None if line.is_empty() => Line::Nothing,
        None => Line::Say(line),
        Some(("quit" | "exit", _)) => Line::Quit,
        Some(("help", _)) => Line::Help,
        Some(("session", name)) if !name.trim().is_empty() => Line::Session(name.trim()),
        Some(_) => Line::Unknown(line),
    }
}

impl Chat {
    /// Prints whether the session is a new one, or how much has been said in it.
    async fn tell_session(&self) -> Result<()> {
        let known = match self.client.session(&self.agent, &self.session).await {
            Ok(detail) => Some(detail.session),
            Err(error)
                if error.downcast_ref().is_some_and(|Refused { code, .. }| code == "session_not_found") =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        eprintln!("{}", style::stderr().dim(&greeting(&self.agent, &self.session, known.as_ref())));
        Ok(())
    }

    async fn interactive(&mut self) -> Result<()> {
        eprintln!("{}", style::stderr().dim("/help shows help, Ctrl-D leaves"));
        let mut editor = rustyline::DefaultEditor::new().context("cannot use this terminal")?;
        loop {
            let line = match tokio::task::block_in_place(|| editor.readline("you> ")) {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            };
            // A line that cannot be added to the history can still be sent.
            let _ = editor.add_history_entry(&line);
            match parse(&line) {
                Line::Nothing => {}
                Line::Help => eprintln!("{HELP}"),
                Line::Quit => return Ok(()),
                Line::Session(name) => {
                    let before = std::mem::replace(&mut self.session, name.to_owned());
                    if let Err(error) = self.tell_session().await {
                        failure::report(&error);
                        self.session = before;
                    }
                }
                Line::Unknown(command) => eprintln!("unknown command {command}\n{HELP}"),
                Line::Say(text) => self.say_or_cancel(text).await?,
            }
        }
    }

    /// Sends the lines of stdin one after the other, and stops at the first failure.
    async fn piped(&mut self) -> Result<()> {
        for line in std::io::stdin().lines() {
            match parse(&line.context("cannot read stdin")?) {
                Line::Session(name) => {
                    self.session = name.to_owned();
                    self.tell_session().await?;
                }
                Line::Quit => return Ok(()),
                Line::Say(text) => self.say(text).await?,
                Line::Nothing | Line::Help => {}
                Line::Unknown(command) => anyhow::bail!("unknown command {command}\n{HELP}"),
            }
        }
        Ok(())
    }

    async fn say_or_cancel(&self, text: &str) -> Result<()> {
        let result = tokio::select! {
            result = self.say(text) => result,
            // Dropping the stream cancels the turn; the host keeps nothing of it.
            _ = tokio::signal::ctrl_c() => {
                eprintln!("\n  cancelled; the agent forgets this message");
                Ok(())
            }
        };
        match result {
            Err(error) if error.is::<Refused>() => {
                failure::report(&error);
                Ok(())
            }
            other => other,
        }
    }

    async fn say(&self, text: &str) -> Result<()> {
        let mut stream = self.client.stream(&self.agent, &self.session, text).await?;
        let report = turn_printer::show(&mut stream).await?;
        eprintln!("{}", style::stderr().dim(&format!("  {}", report.figures())));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_says_whether_it_continues_a_session() {
        assert_eq!(greeting("desk", "chat", None), "talking to desk in the new session chat");
        let object = skep_api::marker::Session;
        let known = Session { object, id: "chat".into(), turns: 2, created_at_ms: 0, updated_at_ms: 0 };
        let said = greeting("desk", "chat", Some(&known));
        let expected = "talking to desk; continuing session chat: 2 turns, the last ";
        assert!(
            said.starts_with(expected) && said.ends_with(" days ago (--new starts another session)"),
            "{said}"
        );
        assert!(new_session().starts_with("chat-1"), "{}", new_session());
    }

    #[test]
    fn a_slash_starts_a_command_and_everything_else_is_a_message() {
        assert_eq!(parse("  hello /there "), Line::Say("hello /there"));
        assert_eq!(parse("/session room-7"), Line::Session("room-7"));
        assert_eq!(parse("/session"), Line::Unknown("/session"));
        assert_eq!(parse("/quit"), Line::Quit);
        assert_eq!(parse(" "), Line::Nothing);
    }
}
