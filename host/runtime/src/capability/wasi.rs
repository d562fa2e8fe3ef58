//! WASI for components of toolchains that require it, reduced to an empty environment.
//!
//! There are no files, environment variables, arguments or network. Output of an agent goes to its log. A command reads its
//! message from standard input, and its standard output is the reply.
//! Clocks and random numbers work, but a component that imports them is deployed only with a grant. In a turn they come
//! from the turn's journal, so that a replayed turn reads the same times and draws the same numbers.

use crate::{
    RuntimeError,
    bindings::log::Level,
    capability::{TurnContext, log::TurnLog},
    journal::{GuestMonotonicClock, GuestWallClock, Journal, random},
};
use std::sync::Arc;
use wasmtime_wasi::{
    WasiCtx, WasiCtxView, WasiView,
    p2::pipe::{MemoryInputPipe, MemoryOutputPipe},
};

/// Maximum size of standard output and of standard error. Writing more is an error for the guest.
const MAX_PRINTED_BYTES: usize = 64 << 10;
/// Maximum size of a command's standard output.
const MAX_REPLY_BYTES: usize = 1 << 20;
/// Maximum size of the part of standard error that is included in an error message.
const MAX_LAST_WORDS_BYTES: usize = 2 << 10;

/// The WASI context of one guest. It is created on first use, because most guests never use it.
#[derive(Default)]
pub(crate) struct Wasi {
    /// Standard input of a command.
    input: Option<String>,
    open: Option<Open>,
    printed: CommandOutput,
}

/// The output of a guest.
#[derive(Default)]
pub(crate) struct CommandOutput {
    /// Standard output of a command. An agent's standard output is in its log instead.
    output: Vec<u8>,
    errors: String,
}

struct Open {
    context: WasiCtx,
    stdout: MemoryOutputPipe,
    stderr: MemoryOutputPipe,
}

impl Wasi {
    pub(crate) fn for_command(input: String) -> Self {
        Wasi { input: Some(input), ..Wasi::default() }
    }

    pub(crate) fn take_output(&mut self) -> CommandOutput {
        std::mem::take(&mut self.printed)
    }

    pub(crate) fn last_error(&self) -> Option<&str> {
        self.printed.last_error()
    }

    pub(crate) fn drain_into(&mut self, log: &mut TurnLog) {
        let Some(Open { stdout, stderr, .. }) = self.open.take() else { return };
        let [output, errors] = [stdout, stderr].map(|pipe| pipe.contents());
        match self.input {
            Some(_) => self.printed.output = output.into(),
            None => write_lines(log, Level::Info, &String::from_utf8_lossy(&output)),
        }
        self.printed.errors = String::from_utf8_lossy(&errors).into_owned();
        write_lines(log, Level::Warn, &self.printed.errors);
    }

    fn context(&mut self, journal: Option<&Arc<Journal>>) -> &mut WasiCtx {
        let input = &mut self.input;
        let open = self.open.get_or_insert_with(|| {
            // One byte more than allowed, to detect excess output.
            let most = input.as_ref().map_or(MAX_PRINTED_BYTES, |_| MAX_REPLY_BYTES + 1);
            let stdout = MemoryOutputPipe::new(most);
            let stderr = MemoryOutputPipe::new(MAX_PRINTED_BYTES);
            let mut builder = WasiCtx::builder();
            builder.stdout(stdout.clone()).stderr(stderr.clone());
            if let Some(input) = input {
                builder.stdin(MemoryInputPipe::new(std::mem::take(input)));
            }
            if let Some(journal) = journal {
                builder
                    .wall_clock(GuestWallClock(journal.clone()))
                    .monotonic_clock(GuestMonotonicClock::new(journal.clone()))
                    .secure_random(random(journal, "random"))
                    .insecure_random(random(journal, "insecure random"))
                    .insecure_random_seed(u128::from_le_bytes(first_16(&journal.derive("insecure seed"))));
            }
            Open { context: builder.build(), stdout, stderr }
        });
        &mut open.context
    }
}

impl CommandOutput {
    /// Returns the end of standard error, which usually says why a process terminated.
    pub(crate) fn last_error(&self) -> Option<&str> {
        let errors = self.errors.trim();
        let from = errors.ceil_char_boundary(errors.len().saturating_sub(MAX_LAST_WORDS_BYTES));
        (!errors.is_empty()).then(|| &errors[from..])
    }

    pub(crate) fn into_reply(self) -> Result<String, RuntimeError> {
        if self.output.len() > MAX_REPLY_BYTES {
            let message = format!(
                "the command printed more than {MAX_REPLY_BYTES} bytes; this bound is not configurable"
            );
            return Err(RuntimeError::LimitExceeded { limit: "reply_bytes", message });
        }
        String::from_utf8(self.output).map_err(|_not_text| RuntimeError::AgentFailed {
            message: "the command's standard output is not valid UTF-8".to_owned(),
        })
    }
}

fn write_lines(log: &mut TurnLog, level: Level, printed: &str) {
    for line in printed.lines() {
        log.write(level, line);
    }
}

impl WasiView for TurnContext {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let journal = self.turn.as_ref().map(|turn| &turn.journal);
        WasiCtxView { ctx: self.wasi.context(journal), table: &mut self.table }
    }
}

fn first_16(bytes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|index| bytes[index])
}
