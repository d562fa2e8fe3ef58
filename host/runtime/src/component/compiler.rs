//! From bytes to code: taken from the cache, or weighed, validated and compiled.
//!
//! The compiler cannot be interrupted. What goes into it is weighed first, it runs on threads of its own, a few at a
//! time, and whoever waits for it waits for so long and no longer; one that is given up keeps its place until it ends.

use super::{artifact::ArtifactCache, hex, imports, weight};
use crate::{Grants, RuntimeError, RuntimeOptions, engine::WasmEngine};
use sha2::{Digest, Sha256};
use skep_store::Store;
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::Component;

/// The bytes of a component: at hand, or in the store.
pub(crate) enum Source {
    Sent(Vec<u8>),
    Stored { digest: String },
}

/// Code, and the component that it is of.
pub(crate) struct Compiled {
    pub(crate) component: Component,
    pub(crate) digest: String,
    /// As they were sent; not there when they were not needed.
    pub(crate) bytes: Option<Arc<Vec<u8>>>,
}

/// Makes code of components. A few compile at once, so that a burst of deployments leaves the processors to the turns.
#[derive(Clone)]
pub(crate) struct ComponentCompiler {
    wasm: WasmEngine,
    store: Store,
    cache: Option<ArtifactCache>,
    places: Arc<Semaphore>,
    max_bytes: usize,
    timeout: Duration,
}

/// What keeps a component from being compiled: it is not as it should be, or the host fails.
pub(crate) enum CompileError {
    Refused(String),
    Host(RuntimeError),
}

impl ComponentCompiler {
    pub(crate) async fn open(wasm: WasmEngine, store: Store, options: &RuntimeOptions) -> Self {
        let mut cache = None;
        if let Some(dir) = &options.artifact_dir {
            let engine = wasm.engine.clone();
            match ArtifactCache::open(store.clone(), engine, dir.clone(), options.max_artifact_bytes).await {
                Ok(opened) => cache = Some(opened),
                Err(error) => tracing::warn!("every start compiles: {error}"),
            }
        }
        let places = Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)));
        let (max_bytes, timeout) = (options.max_component_bytes, options.compile_timeout);
        ComponentCompiler { wasm, store, cache, places, max_bytes, timeout }
    }

    /// The code of a component that imports nothing beyond `grants`.
    pub(crate) async fn compile(&self, source: Source, grants: &Grants) -> Result<Compiled, CompileError> {
        let (digest, mut bytes) = match source {
            Source::Stored { digest } => (digest, None),
            Source::Sent(bytes) => {
                self.check_size(&bytes)?;
                let bytes = Arc::new(bytes);
                let hashed = bytes.clone();
                let digest = apart(move || Ok(hex(&Sha256::digest(hashed.as_slice())))).await?;
                (digest, Some(bytes))
            }
        };
        if let Some(cache) = &self.cache
            && let Some(component) = cache.load(&digest).await
        {
            imports::check(&component, &self.wasm.engine, grants).map_err(CompileError::Refused)?;
            return Ok(Compiled { component, digest, bytes });
        }
        let (code, place) = match &bytes {
            Some(bytes) => (bytes.clone(), self.place_in_time().await?),
            // At the start of the host all agents come at once, and each waits for its turn.
            None => {
                let place = self.place().await;
                let stored = self.store.component(&digest).await;
                let stored = stored.map_err(|error| CompileError::Host(error.into()))?;
                (bytes.insert(Arc::new(stored)).clone(), place)
            }
        };
        let component = self.compile_bytes(code, place).await?;
        imports::check(&component, &self.wasm.engine, grants).map_err(CompileError::Refused)?;
        if let Some(cache) = &self.cache {
            cache.keep(&digest, &component).await;
        }
        Ok(Compiled { component, digest, bytes })
    }

    async fn compile_bytes(
        &self,
        bytes: Arc<Vec<u8>>,
        place: OwnedSemaphorePermit,
    ) -> Result<Component, CompileError> {
        let (engine, max_bytes) = (self.wasm.engine.clone(), self.max_bytes as u64);
        let compiling = apart(move || {
            let _place = place;
            refuse_no_component(&bytes)?;
            weight::check(&bytes, max_bytes)?;
            Component::from_binary(&engine, &bytes).map_err(|error| refusal(&error))
        });
        match tokio::time::timeout(self.timeout, compiling).await {
            Ok(compiled) => compiled,
            Err(_elapsed) => Err(CompileError::Refused(format!(
                "it is not compiled after {} s; `compile_s` under [runtime] in skep.toml sets the bound",
                self.timeout.as_secs_f32()
            ))),
        }
    }

    async fn place(&self) -> OwnedSemaphorePermit {
        self.places.clone().acquire_owned().await.expect("the semaphore is never closed")
    }

    async fn place_in_time(&self) -> Result<OwnedSemaphorePermit, CompileError> {
        tokio::time::timeout(self.timeout, self.place()).await.map_err(|_elapsed| {
            CompileError::Refused(format!(
                "other components are still being compiled after {} s; deploy it later",
                self.timeout.as_secs_f32()
            ))
        })
    }

    fn check_size(&self, bytes: &[u8]) -> Result<(), CompileError> {
        if bytes.len() <= self.max_bytes {
            return Ok(());
        }
        Err(CompileError::Refused(format!(
            "it has {} bytes; {} are allowed by `max_component_bytes` under [runtime] in skep.toml",
            bytes.len(),
            self.max_bytes
        )))
    }
}

/// Of what is larger than any agent may be, the compiler knows before there is an instance.
fn refusal(error: &wasmtime::Error) -> String {
    let reason = format!("{error:#}");
    if ["pooling allocator", "exceeds the limit of"].iter().any(|words| reason.contains(words)) {
        return format!(
            "{reason}; memory_mb, tables, table_elements and instances under [limits] in skep.toml are the operator's ceilings"
        );
    }
    reason
}

/// By the first eight bytes: the magic number, the version, and whether it is a module or a component.
fn refuse_no_component(bytes: &[u8]) -> Result<(), String> {
    match bytes.get(..8) {
        Some([0, b'a', b's', b'm', _, _, 1, 0]) => Ok(()),
        Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => {
            Err("it is a core WebAssembly module, not a component; `skep build` makes a component of it"
                .into())
        }
        _ => Err("it is not WebAssembly, which begins with the bytes \"\\0asm\"; a component is wanted, as \
                  `skep build` makes it"
            .into()),
    }
}

async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, CompileError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| {
        CompileError::Host(RuntimeError::Internal { message: format!("the compiler stopped: {error}") })
    })?
    .map_err(CompileError::Refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_component_is_told_in_a_line() {
        refuse_no_component(b"\0asm\x0d\0\x01\0...").expect("a component, as far as eight bytes tell");
        for (bytes, expected) in [
            (&b"junk that is no component"[..], "it is not WebAssembly"),
            (b"", "it is not WebAssembly"),
            (b"\0asm\x01\0\0\0", "it is a core WebAssembly module"),
        ] {
            let error = refuse_no_component(bytes).expect_err(expected);
            assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
        }
    }
}
