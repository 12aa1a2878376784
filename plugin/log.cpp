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
    : std::runtime_error(what + "\n  where " + where + "\n  got   " + got + "\n  need  " + need +
                         "\n  do    " + todo) {}

}  // namespace flash_export
