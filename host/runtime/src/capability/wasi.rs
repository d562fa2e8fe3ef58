//! WASI for components of toolchains that cannot do without: an empty world.
//!
//! There are no files, no environment, no arguments and no network. What the guest prints goes to the agent's log.
//! Clocks and random numbers work, but a component that imports them is deployed only if it has the grant. In a turn they
//! are the turn's own, so that one that is run again reads and draws the same.

use super::{TurnContext, log::TurnLog};
use crate::{
    bindings::log::Level,
    journal::{Journal, MonotonicClock, WallClock, random},
};
use std::sync::Arc;
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView, p2::pipe::MemoryOutputPipe};

/// Of standard output and of standard error; what is over is an error for the guest.
const MAX_PRINTED_BYTES: usize = 64 << 10;

/// Made when a guest first uses it: most never do.
#[derive(Default)]
pub(crate) struct Wasi {
    open: Option<Open>,
}

struct Open {
    context: WasiCtx,
    stdout: MemoryOutputPipe,
    stderr: MemoryOutputPipe,
}

impl Wasi {
    pub(crate) fn drain_into(&mut self, log: &mut TurnLog) {
        let Some(open) = self.open.take() else { return };
        for (pipe, level) in [(open.stdout, Level::Info), (open.stderr, Level::Warn)] {
            for line in String::from_utf8_lossy(&pipe.contents()).lines() {
                log.write(level, line);
            }
        }
    }

    fn context(&mut self, journal: Option<&Arc<Journal>>) -> &mut WasiCtx {
        let open = self.open.get_or_insert_with(|| {
            let stdout = MemoryOutputPipe::new(MAX_PRINTED_BYTES);
            let stderr = MemoryOutputPipe::new(MAX_PRINTED_BYTES);
            let mut builder = WasiCtx::builder();
            builder.stdout(stdout.clone()).stderr(stderr.clone());
            if let Some(journal) = journal {
                builder
                    .wall_clock(WallClock(journal.clone()))
                    .monotonic_clock(MonotonicClock::new(journal.clone()))
                    .secure_random(random(journal, "random"))
                    .insecure_random(random(journal, "insecure random"))
                    .insecure_random_seed(u128::from_le_bytes(first_16(&journal.derive("insecure seed"))));
            }
            Open { context: builder.build(), stdout, stderr }
        });
        &mut open.context
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
