//! Files of clients, such as the requests of a batch. They have the same room as all batches, besides it.

use super::AgentHost;
use crate::{BatchOptions, RuntimeError, batch::Context, tenancy::TENANT_SHARE, text::excerpt};
use skep_store::{BatchRoom, FileRow, NewFile, Queued};
use std::{sync::Arc, time::Duration};

const RETRY_AFTER_MS: u32 = 10_000;

/// A file to be stored.
#[derive(Clone, Debug)]
pub struct NewClientFile {
    pub principal: String,
    pub name: String,
    pub purpose: String,
    /// Time after which the file is deleted.
    pub keep: Duration,
    pub body: Arc<[u8]>,
}

/// A stored file without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFile {
    pub id: String,
    pub name: String,
    pub purpose: String,
    pub bytes: u64,
    pub created_at_ms: u64,
    pub expires_at_ms: u64,
}

impl AgentHost {
    /// Stores a file. It is durable when this returns.
    pub async fn store_client_file(&self, file: NewClientFile) -> Result<ClientFile, RuntimeError> {
        let Context { store, clock, shutdown, tenancy, .. } = self.inner.batches.context();
        shutdown.admit()?;
        let at_ms = clock.now_ms();
        let keep_ms = u64::try_from(file.keep.as_millis()).unwrap_or(u64::MAX);
        let NewClientFile { principal, name, purpose, body, .. } = file;
        let id = format!("file-{}", uuid::Uuid::now_v7().simple());
        let expires_at_ms = at_ms.saturating_add(keep_ms).min(i64::MAX as u64);
        let row = NewFile { id, principal, name, purpose, at_ms, expires_at_ms, body };
        store.forget_files(at_ms).await?;
        let BatchOptions { max_stored_bytes, max_batches, .. } = *self.inner.batches.options();
        let share = tenancy.has_several().then_some(TENANT_SHARE as u64);
        let room = BatchRoom { bytes: max_stored_bytes, batches: max_batches, share };
        let stored = ClientFile {
            id: row.id.clone(),
            name: row.name.clone(),
            purpose: row.purpose.clone(),
            bytes: row.body.len() as u64,
            created_at_ms: at_ms,
            expires_at_ms,
        };
        match store.store_file(row, room).await? {
            Queued::New => Ok(stored),
            Queued::Full => {
                let message = format!(
                    "there is no room for this file: the host keeps {max_batches} files and {max_stored_bytes} bytes, a part \
                     of them reserved for other tenants; delete files that are no longer needed"
                );
                Err(RuntimeError::QueueFull { message, retry_after_ms: RETRY_AFTER_MS })
            }
        }
    }

    /// Returns the files of a principal, the oldest first.
    pub async fn client_files(&self, principal: &str) -> Result<Vec<ClientFile>, RuntimeError> {
        let Context { store, clock, .. } = self.inner.batches.context();
        let rows = store.files(principal, clock.now_ms()).await?;
        Ok(rows.into_iter().map(ClientFile::from).collect())
    }

    /// Returns a file of this principal.
    pub async fn client_file(&self, principal: &str, id: &str) -> Result<ClientFile, RuntimeError> {
        let Context { store, clock, .. } = self.inner.batches.context();
        let row = store.file(id, clock.now_ms()).await?;
        let own = row.filter(|row| row.principal == principal);
        own.map(ClientFile::from).ok_or_else(|| not_found(id))
    }

    /// Returns the content of a file of this principal.
    pub async fn client_file_content(&self, principal: &str, id: &str) -> Result<Vec<u8>, RuntimeError> {
        let file = self.client_file(principal, id).await?;
        self.inner.batches.context().store.file_content(&file.id).await?.ok_or_else(|| not_found(id))
    }

    /// Deletes a file of this principal. Batches that were made from it are not changed.
    pub async fn delete_client_file(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        let file = self.client_file(principal, id).await?;
        match self.inner.batches.context().store.delete_file(&file.id).await? {
            true => Ok(()),
            false => Err(not_found(id)),
        }
    }
}

fn not_found(id: &str) -> RuntimeError {
    RuntimeError::FileNotFound { id: excerpt(id) }
}

impl From<FileRow> for ClientFile {
    fn from(row: FileRow) -> Self {
        let FileRow { id, name, purpose, bytes, at_ms, expires_at_ms, .. } = row;
        ClientFile { id, name, purpose, bytes, created_at_ms: at_ms, expires_at_ms }
    }
}
