//! A conversation in a test, held in memory.

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::Value;

use super::compaction;
use super::memory_host::{World, unanswered};
use super::memory_stream::MemoryStream;
use crate::host::{HostConversation, HostStream, Task};
use crate::{
    CompactOptions, Compaction, CompactionPolicy, Entry, GenerateOptions, Generation, InferenceError, Usage,
};

/// Default number of messages that a compaction keeps.
const KEEP_RECENT: u32 = 8;

/// A handle of a conversation in the world of a test.
pub struct MemoryConversation {
    pub world: Rc<RefCell<World>>,
    /// Name of the conversation within its session.
    pub name: String,
}

impl HostConversation for MemoryConversation {
    fn set_system(&self, text: &str) -> Result<(), InferenceError> {
        let mut world = self.world.borrow_mut();
        let entries = world.entries(&self.name);
        let system = Entry::System(text.to_owned());
        match entries.first_mut() {
            Some(first @ Entry::System(_)) => *first = system,
            _ => entries.insert(0, system),
        }
        Ok(())
    }

    fn append_user(&self, text: &str) -> Result<(), InferenceError> {
        self.world.borrow_mut().entries(&self.name).push(Entry::User(text.to_owned()));
        Ok(())
    }

    fn append_tool_result(
        &self,
        call_id: &str,
        outcome: &Result<Value, String>,
    ) -> Result<(), InferenceError> {
        self.world.borrow_mut().answer(&self.name, call_id, outcome)
    }

    fn messages(&self) -> Vec<Entry> {
        self.world.borrow_mut().entries(&self.name).clone()
    }

    fn messages_page(&self, skip: u32, limit: u32) -> Vec<Entry> {
        let mut world = self.world.borrow_mut();
        world.entries(&self.name).iter().skip(skip as usize).take(limit as usize).cloned().collect()
    }

    fn reasoning(&self) -> Option<String> {
        self.world.borrow().saved.reasoning.get(&self.name).cloned()
    }

    /// Does nothing, because a scripted model's context never becomes full.
    fn set_compaction(&self, _policy: &CompactionPolicy) {}

    fn compact(&self, options: CompactOptions) -> Task<'_, Result<Compaction, InferenceError>> {
        Box::pin(async move {
            let mut world = self.world.borrow_mut();
            let entries = world.entries(&self.name).clone();
            let keep = options.keep_recent.unwrap_or(KEEP_RECENT) as usize;
            let Some(at) = compaction::cut(&entries, keep) else {
                return Ok(Compaction { dropped: 0, summary: String::new() });
            };
            let summary = match options.summary {
                Some(summary) => summary,
                None => world.generate(entries[..at].to_vec(), &GenerateOptions::default())?.text,
            };
            *world.entries(&self.name) = compaction::compacted(&entries, at, &summary);
            let system = entries.iter().take_while(|entry| matches!(entry, Entry::System(_))).count();
            Ok(Compaction { dropped: (at - system) as u32, summary })
        })
    }

    fn generate(&self, options: GenerateOptions) -> Task<'_, Result<Generation, InferenceError>> {
        Box::pin(async move {
            let mut world = self.world.borrow_mut();
            let prompt = world.entries(&self.name).clone();
            if let Some(call) = unanswered(&prompt).next() {
                let why = format!("the call `{}` of `{}` has no result yet", call.id, call.name);
                return Err(InferenceError::InvalidArgument(why));
            }
            let mut generation = world.generate(prompt, &options)?;
            match generation.reasoning.take() {
                Some(reasoning) => world.saved.reasoning.insert(self.name.clone(), reasoning),
                None => world.saved.reasoning.remove(&self.name),
            };
            world.entries(&self.name).push(Entry::Assistant {
                text: generation.text.clone(),
                tool_calls: generation.tool_calls.clone(),
            });
            Ok(generation)
        })
    }

    fn stream(&self, options: GenerateOptions) -> Task<'_, Result<Box<dyn HostStream>, InferenceError>> {
        Box::pin(async move {
            let generation = self.generate(options).await?;
            let pieces = generation.text.split_inclusive(' ').map(str::to_owned).collect();
            Ok(Box::new(MemoryStream::new(pieces, generation)) as Box<dyn HostStream>)
        })
    }

    fn fork(&self, name: &str) -> Result<Rc<dyn HostConversation>, InferenceError> {
        let mut world = self.world.borrow_mut();
        let entries = world.entries(&self.name).clone();
        if !world.entries(name).is_empty() {
            return Err(InferenceError::InvalidArgument(format!(
                "a conversation named `{name}` already exists"
            )));
        }
        *world.entries(name) = entries;
        if let Some(reasoning) = world.saved.reasoning.get(&self.name).cloned() {
            world.saved.reasoning.insert(name.to_owned(), reasoning);
        }
        Ok(Rc::new(MemoryConversation { world: self.world.clone(), name: name.to_owned() }))
    }

    fn clear(&self) {
        let mut world = self.world.borrow_mut();
        world.entries(&self.name).clear();
        world.saved.reasoning.remove(&self.name);
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}
