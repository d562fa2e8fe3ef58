//! The links of the repository's Markdown pages: each leads to a file, and to a heading of it if it names one.

use crate::harness::repository;
use std::{
    fs,
    path::{Path, PathBuf},
};

#[test]
fn every_link_of_a_page_leads_to_a_file_and_a_heading() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in pages(&repository()) {
        let text = fs::read_to_string(&page).unwrap();
        for link in links(&text).iter().filter(|link| !link.contains("://")) {
            count += 1;
            if let Err(fault) = check(&page, link) {
                faults.push(format!("{}: {link}: {fault}", page.display()));
            }
        }
    }
    assert!(count > 200, "found only {count} links");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn check(page: &Path, link: &str) -> Result<(), &'static str> {
    let (path, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    if !target.exists() {
        return Err("there is no such file");
    }
    let has_headings = target.extension().is_some_and(|extension| extension == "md");
    if heading.is_empty() || !has_headings {
        return Ok(());
    }
    let text = fs::read_to_string(target).unwrap();
    match prose(&text).any(|line| line.starts_with('#') && anchor(line) == heading) {
        true => Ok(()),
        false => Err("the page has no such heading"),
    }
}

/// Lists the Markdown pages, except those of dependencies and those that are kept as they were.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let kept = ["target", "shared", "node_modules", "vendor", "fixtures", ".git", ".venv"];
    let mut found = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && !kept.contains(&name) {
            found.extend(pages(&path));
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
    found
}

/// Returns the lines of a page outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the targets of the links `[text](target)` of a page.
fn links(text: &str) -> Vec<String> {
    let text = prose(text).collect::<Vec<_>>().join("\n");
    // Outside of code spans, which have every second place between the back ticks.
    let text = text.split('`').step_by(2).collect::<Vec<_>>().join("_");
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_owned()).collect()
}

/// Returns the anchor of a heading: its letters and digits in lower case, with hyphens for spaces.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
    let text: String = heading.trim_start_matches('#').trim().chars().filter(kept).collect();
    text.to_lowercase().replace(' ', "-")
}

#[test]
fn links_and_anchors_are_read_as_pages_show_them() {
    let page = "See [a](a.md#b-c), `[x](y)` and\n```sh\n[z](z)\n```\n[d\ne](#f).";
    assert_eq!(links(page), ["a.md#b-c", "#f"]);
    assert_eq!(anchor("## `[kv]`: KV pages, on disk"), "kv-kv-pages-on-disk");
}
