// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <atomic>
#include <cstdio>

namespace flash_export {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> gFinder{nullptr};

char const* nameOf(nvinfer1::ILogger::Severity severity) noexcept {
  using Severity = nvinfer1::ILogger::Severity;
  switch (severity) {
    case Severity::kINTERNAL_ERROR:
      return "internal error";
    case Severity::kERROR:
      return "error";
    case Severity::kWARNING:
      return "warning";
    default:
      return "info";
  }
}

// `text` with the lines behind its first under the first, so that no part of a message looks like another.
std::string aligned(std::string const& text) {
  std::string lines;
  for (char const c : text) lines += c == '\n' ? "\n        " : std::string{c};
  return lines;
}

nvinfer1::ILogger* findLogger() {
  nvinfer1::ILoggerFinder* const finder = gFinder.load();
  return finder == nullptr ? nullptr : finder->findLogger();
}

}  // namespace

void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { gFinder.store(finder); }

void log(nvinfer1::ILogger::Severity severity, char const* text) noexcept {
  try {
    // findLogger() is the host's and not noexcept.
    if (nvinfer1::ILogger* const logger = findLogger()) {
      logger->log(severity, text);
      return;
    }
  } catch (...) {
    // The message still goes out, below.
  }
  std::fprintf(stderr, "flash_export plugin: %s: %s\n", nameOf(severity), text);
}

PluginError::PluginError(std::string const& what, std::string const& where, std::string const& got,
                         std::string const& need, std::string const& todo)
    : std::runtime_error(what + "\n  where " + aligned(where) + "\n  got   " + aligned(got) + "\n  need  " +
                         aligned(need) + "\n  do    " + aligned(todo)) {}

}  // namespace flash_export
