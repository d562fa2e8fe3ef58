//! Tests of erasures with real files: who is notified of them.

use super::tests::{open, tokens, write};
use super::*;

#[test]
fn pages_that_are_erased_here_alone_are_not_reported_to_holders_of_copies() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, form) = open(folder.path());
    let (erased, notices) = channel();
    tier.when_erased(move |pages| erased.send(pages).unwrap());
    write(&tier, form, "t", "s", &tokens(1, 3));
    assert_eq!((tier.forget(EraseFilter::AllHere), tier.status().pages), (3, 0));
    write(&tier, form, "t", "s", &tokens(1, 2));
    assert_eq!((tier.forget(EraseFilter::All), tier.status().pages), (2, 0));
    assert_eq!(notices.try_iter().collect::<Vec<_>>(), [ErasedPages::All]);
}
