//! WASI for components of toolchains that cannot do without: an empty world.
//!
//! There are no files, no environment, no arguments and no network. What the guest prints goes to the agent's log.
//! Clocks and random numbers work, but a component that imports them is deployed only if it has the grant.

use super::{TurnContext, log::TurnLog};
use crate::bindings::log::Level;
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

    fn context(&mut self) -> &mut WasiCtx {
        let open = self.open.get_or_insert_with(|| {
            let stdout = MemoryOutputPipe::new(MAX_PRINTED_BYTES);
            let stderr = MemoryOutputPipe::new(MAX_PRINTED_BYTES);
            let context = WasiCtx::builder().stdout(stdout.clone()).stderr(stderr.clone()).build();
            Open { context, stdout, stderr }
        });
        &mut open.context
    }
}

impl WasiView for TurnContext {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: self.wasi.context(), table: &mut self.table }
    }
}
