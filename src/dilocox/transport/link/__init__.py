"""Links between two ranks: TLS 1.3 connections that resume transfers after they broke."""
