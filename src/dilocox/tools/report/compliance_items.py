"""What rules ask to be documented, in our own words, and which facts of a run answer it.

The texts name a rule's own article, annex or section, and are no copy of the rule. Sources:
Regulation (EU) 2024/1689 (AI Act), annexes IV and XI and article 53(1)(d) with the Commission's
template of 24 July 2025; SR 26-2 / OCC Bulletin 2026-13 of 17 April 2026, which replaced SR 11-7;
Regulation (EU) 2016/679 (GDPR); 45 CFR part 164 (HIPAA).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One thing that a rule asks for."""

    place: str
    """Article, point or section of the rule."""
    asked: str
    facts: tuple[str, ...]
    """Groups of facts (`compliance_facts.GROUPS`) that answer a part of it. Empty: none does."""
    missing: str
    """What no record can say. Empty: nothing is missing."""
    writer: str = "the provider"
    """Who must write the missing part."""


@dataclass(frozen=True)
class Rule:
    """A rule and its items."""

    title: str
    applies: str
    """For whom, and from when, as far as we know."""
    items: tuple[Item, ...]


ANNEX_IV = Rule(
    "EU AI Act, Annex IV: technical documentation of high-risk AI systems (article 11)",
    "For providers of high-risk AI systems (article 6). An amendment adopted in June 2026 moves "
    "the date for systems of Annex III to 2 December 2027: check the Official Journal. The "
    "documentation is about a system; a model is a part of it.",
    (
        Item("1(a)", "purpose, provider, version and its relation to earlier versions",
             ("identity",), "intended purpose, name of the provider, version of the system"),
        Item("1(b)", "how the system works with other hardware and software", (),
             "all of it"),
        Item("1(c)", "versions of software and firmware", ("software",),
             "software and firmware of the system in use; the versions here are those of training"),
        Item("1(d)", "forms in which the system is put on the market", ("release",),
             "all forms other than the model's files"),
        Item("1(e)", "hardware that the system is meant to run on", (), "all of it"),
        Item("1(f) to (h)", "pictures of products, user interface, instructions for use", (),
             "all of it"),
        Item("2(a)", "methods and steps of development, and models of third parties that were used",
             ("method", "base"), "tools and models that were used outside this run"),
        Item("2(b)", "design: logic, choices and their reasons, what is optimised, trade-offs",
             ("architecture", "method"), "reasons, assumptions, expected output, trade-offs"),
        Item("2(c)", "architecture, and computing used to develop, train, test and validate",
             ("architecture", "compute"), "computing outside this run"),
        Item("2(d)", "training data: origin, scope, how obtained, chosen, labelled and cleaned",
             ("data",), "how the text was obtained, labelled and cleaned before it came here; "
             "rights to it; who and what it is about"),
        Item("2(e)", "human oversight (article 14) and how outputs can be interpreted", (),
             "all of it"),
        Item("2(f)", "changes of the system that are planned in advance", (), "all of it"),
        Item("2(g)", "validation and tests: data, metrics, discrimination, signed test reports",
             ("evaluation", "audits"), "accuracy and robustness for the intended purpose, "
             "discriminatory impact, test reports dated and signed by those responsible"),
        Item("2(h)", "cybersecurity measures", ("integrity",),
             "measures of the system in use, and of the sites' own machines"),
        Item("3", "capabilities and limits, accuracy by groups of persons, foreseeable risks, "
             "input data", (), "all of it"),
        Item("4", "why the metrics of performance are appropriate", (), "all of it"),
        Item("5", "risk management system (article 9)", (), "all of it"),
        Item("6", "relevant changes over the life cycle", ("changes",),
             "changes before and after this run"),
        Item("7 and 8", "harmonised standards applied; EU declaration of conformity (article 47)",
             (), "all of it"),
        Item("9", "monitoring after placing on the market (article 72)", (), "all of it"),
    ),
)  # fmt: skip

ANNEX_XI = Rule(
    "EU AI Act, Annex XI: technical documentation of general-purpose AI models "
    "(article 53(1)(a))",
    "For providers of general-purpose AI models, since 2 August 2025. Models under a free licence "
    "are partly exempt (article 53(2)).",
    (
        Item("Section 1, 1(a), (b)", "tasks, systems it can be part of, acceptable use", (),
             "all of it"),
        Item("Section 1, 1(c)", "date of release and ways of distribution", ("release",),
             "date and ways"),
        Item("Section 1, 1(d)", "architecture and number of parameters", ("architecture",), ""),
        Item("Section 1, 1(e), (f)", "modality, format of input and output; licence", (),
             "all of it; dilocox trains models of text"),
        Item("Section 1, 2(a)", "technical means to integrate the model", (), "all of it"),
        Item("Section 1, 2(b)", "design, training method, choices and their reasons",
             ("method", "base", "architecture"), "reasons and assumptions"),
        Item("Section 1, 2(c)", "data for training, testing and validation", ("data",),
             "how the text was obtained and chosen, measures against unsuitable sources and bias"),
        Item("Section 1, 2(d)", "computing: amount, training time", ("compute",),
             "computing outside this run; the kinds and number of machines, if they are not named"),
        Item("Section 1, 2(e)", "energy, known or estimated", (),
             "all of it: from meters, or estimated from the time and the machines' power"),
        Item("Section 2", "for models with systemic risk: evaluations, adversarial tests, "
             "architecture of the system", ("evaluation",), "evaluations beyond these figures, "
             "adversarial tests, architecture of the system"),
    ),
)  # fmt: skip

SUMMARY = Rule(
    "EU AI Act, article 53(1)(d): public summary of the training content",
    "For providers of general-purpose AI models, in the Commission's template of 24 July 2025, "
    "which has three sections.",
    (
        Item("Section 1", "general: provider, model, modalities, sizes of the training data",
             ("identity", "base", "data"), "provider, representative, dates, characteristics of "
             "the data as the template asks"),
        Item("Section 2", "list of sources: public and private data sets, crawled, from users, "
             "synthetic", ("data", "privacy"), "kind of each source in the template's words; "
             "crawlers and most visited domains; text before it became a file"),
        Item("Section 3", "processing: rights reserved by their holders, illegal content",
             (), "all of it"),
    ),
)  # fmt: skip

MODEL_RISK = Rule(
    "Model risk management of banks: SR 26-2 and OCC Bulletin 2026-13, formerly SR 11-7",
    "Guidance of the US agencies of 17 April 2026, mainly for banks of more than 30 billion USD. "
    "It leaves generative AI out of its scope.",
    (
        Item("development", "purpose, design, theory, data, assumptions", ("method", "data",
             "architecture", "base"), "purpose, theory, suitability of the data, assumptions",
             "the model's developer"),
        Item("testing", "tests of the model before use, and their results", ("evaluation",),
             "tests for the bank's use, limits, sensitivity", "the model's developer"),
        Item("implementation", "the model in use is the one that was tested",
             ("identity", "release", "integrity"), "the bank's own systems around the model",
             "the model's owner"),
        Item("validation", "conceptual soundness, outcomes and effective challenge by people who "
             "did not build it", ("audits",), "the validation itself. An audit repeats training; "
             "it does not judge whether the model is fit", "independent validators"),
        Item("monitoring", "performance and changes over time", ("changes",),
             "monitoring in use", "the model's owner"),
        Item("governance", "inventory, roles, policies, models of vendors", ("identity",),
             "all else", "the institution"),
    ),
)  # fmt: skip

HEALTH = Rule(
    "Health data: GDPR and HIPAA",
    "For controllers and processors of personal data concerning health (GDPR, articles 4(15) and "
    "9), and for covered entities and business associates (45 CFR part 164).",
    (
        Item("GDPR 6, 9", "legal basis and exception for health data", (), "all of it",
             "the controller"),
        Item("GDPR 25, 32; HIPAA 164.312", "protection by design; access, audit controls, "
             "integrity, transmission", ("integrity", "privacy"),
             "measures at the sites: access, encryption of disks, logs of access",
             "the controller or covered entity"),
        Item("GDPR 28; HIPAA 164.504(e)", "contracts with processors and business associates", (),
             "all of it: among the sites, and with the coordinator's operator",
             "the controller or covered entity"),
        Item("GDPR 30", "record of processing activities", ("data", "privacy"),
             "purposes, categories of persons, recipients, time limits", "the controller"),
        Item("GDPR 35; HIPAA 164.308(a)(1)", "impact assessment; risk analysis", ("privacy",),
             "the assessment itself. Payloads and model can reveal text (docs/private-data.md)",
             "the controller or covered entity"),
        Item("GDPR 4(1), recital 26; HIPAA 164.514(a), (b)", "whether data are anonymous or "
             "de-identified", ("privacy",), "the determination. dilocox de-identifies nothing",
             "the controller, or the expert of 164.514(b)(1)"),
        Item("GDPR 15 to 22", "rights of persons, erasure among them", (),
             "all of it. A trained model cannot be made to forget by deleting text",
             "the controller"),
    ),
)  # fmt: skip

RULES = (ANNEX_IV, ANNEX_XI, SUMMARY, MODEL_RISK, HEALTH)
"""All rules, in the order of the report."""
