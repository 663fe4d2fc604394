# Thin over dev.py, which uses nothing but the standard library.
# Arguments go through ARGS: make test ARGS="tests/unit/log -x"
PYTHON ?= python3
COMMANDS = setup demo test check test-all test-long bench clean help

.DEFAULT_GOAL = help
.PHONY: $(COMMANDS)
$(COMMANDS):
	@$(PYTHON) dev.py $@ $(ARGS)
