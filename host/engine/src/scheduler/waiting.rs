//! Sequences that wait to run. Interactive before background; within each, sequences that were preempted first (they
//! are the oldest work), then round robin over who asks, so that one busy session does not hold up the others.

use std::collections::VecDeque;

use crate::sequence::Sequence;
use crate::{Affinity, Priority};

#[derive(Default)]
pub(super) struct Waiting {
    interactive: Lanes,
    background: Lanes,
}

#[derive(Default)]
struct Lanes {
    preempted: VecDeque<Sequence>,
    /// None is empty; the front one is next.
    lanes: VecDeque<(Affinity, VecDeque<Sequence>)>,
}

impl Waiting {
    pub fn push(&mut self, sequence: Sequence) {
        let lanes = &mut self.class(sequence.request.priority).lanes;
        match lanes.iter_mut().find(|(affinity, _)| *affinity == sequence.request.affinity) {
            Some((_, lane)) => lane.push_back(sequence),
            None => lanes.push_back((sequence.request.affinity.clone(), VecDeque::from([sequence]))),
        }
    }

    /// Puts a preempted sequence before all that have not run yet, oldest first.
    pub fn push_preempted(&mut self, sequence: Sequence) {
        let preempted = &mut self.class(sequence.request.priority).preempted;
        let at = preempted.partition_point(|other| other.id < sequence.id);
        preempted.insert(at, sequence);
    }

    pub fn peek(&self) -> Option<&Sequence> {
        self.interactive.peek().or_else(|| self.background.peek())
    }

    pub fn pop(&mut self) -> Option<Sequence> {
        self.interactive.pop().or_else(|| self.background.pop())
    }

    pub fn len(&self) -> usize {
        self.interactive.len() + self.background.len()
    }

    /// Takes out all sequences for which `gone` holds.
    pub fn remove_if(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed = Vec::new();
        for class in [&mut self.interactive, &mut self.background] {
            for lane in class.lanes.iter_mut().map(|(_, lane)| lane).chain([&mut class.preempted]) {
                if lane.iter().any(&mut gone) {
                    let (out, keep): (Vec<_>, Vec<_>) = lane.drain(..).partition(&mut gone);
                    lane.extend(keep);
                    removed.extend(out);
                }
            }
            class.lanes.retain(|(_, lane)| !lane.is_empty());
        }
        removed
    }

    fn class(&mut self, priority: Priority) -> &mut Lanes {
        match priority {
            Priority::Interactive => &mut self.interactive,
            Priority::Background => &mut self.background,
        }
    }
}

impl Lanes {
    fn peek(&self) -> Option<&Sequence> {
        self.preempted.front().or_else(|| self.lanes.front()?.1.front())
    }

    fn pop(&mut self) -> Option<Sequence> {
        if let Some(sequence) = self.preempted.pop_front() {
            return Some(sequence);
        }
        let (affinity, mut lane) = self.lanes.pop_front()?;
        let sequence = lane.pop_front();
        if !lane.is_empty() {
            self.lanes.push_back((affinity, lane));
        }
        sequence
    }

    fn len(&self) -> usize {
        self.preempted.len() + self.lanes.iter().map(|(_, lane)| lane.len()).sum::<usize>()
    }
}
